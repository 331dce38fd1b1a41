package vorrang

import (
	"math/rand/v2"
	"testing"
)

// TestAutomaticCreditNeverStallsAndIsBounded lets a server send what it may, a reader read what it likes, and the
// connection break now and then, and counts.
func TestAutomaticCreditNeverStallsAndIsBounded(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 7))
		window := 1 + random.IntN(20)
		c := newCredit(uint32(window))
		atServer, waiting, excess := window, 0, 0
		for range 400 {
			switch random.IntN(8) {
			case 0, 1, 2:
				tokens := random.IntN(atServer + 1)
				atServer -= tokens
				waiting += tokens
				c.receive(tokens)
			case 3, 4, 5, 6:
				tokens := random.IntN(waiting + 1)
				waiting -= tokens
				excess = max(0, excess-tokens)
				c.consume(tokens)
				atServer += int(c.takeDue())
			case 7:
				if random.IntN(10) == 0 {
					c.renew(false)
					atServer = window
					excess = waiting
				}
			}
			if atServer+waiting > window+excess {
				t.Fatalf("seed %d: %d may come, %d wait, the window is %d and %d", seed, atServer, waiting, window, excess)
			}
			if atServer == 0 && waiting == 0 {
				t.Fatalf("seed %d: everything was read and nothing may come", seed)
			}
		}
	}
}

func TestCreditByHandSurvivesAResumption(t *testing.T) {
	c := newCredit(5)
	c.granted += 20
	c.receive(8)
	if missing := c.renew(true); missing != 12 {
		t.Errorf("25 were granted, 8 came, the server grants 5 anew, and %d are added", missing)
	}
	c.receive(17)
	if missing := c.renew(true); missing != 0 {
		t.Errorf("nothing was left and %d are added", missing)
	}
}
