package vorrang

// credit counts the output tokens of one request between server, client and reader.
//
// Invariant, with automatic credit and but for what waited when a session was resumed: tokens that the server may
// still send and tokens that wait to be read are at most window together.
type credit struct {
	window   uint32 // what the server grants at the start and after each resumption
	granted  uint64 // manual: all that was granted, counted from the first token of the output
	received uint64 // tokens that came
	consumed uint64 // tokens that were read
	due      uint32 // automatic: tokens that were read and not granted again
	excess   uint64 // automatic: tokens to be read before anything is due
}

func newCredit(window uint32) credit { return credit{window: window, granted: uint64(window)} }

func (c *credit) receive(tokens int) { c.received += uint64(tokens) }

func (c *credit) consume(tokens int) {
	c.consumed += uint64(tokens)
	repaid := min(c.excess, uint64(tokens))
	c.excess -= repaid
	c.due += uint32(uint64(tokens) - repaid)
}

// takeDue is what to grant now: nothing until half of the window was read, as a frame is not worth a single token.
func (c *credit) takeDue() uint32 {
	if c.window == 0 || c.due < max(1, c.window/2) {
		return 0
	}
	due := c.due
	c.due = 0
	return due
}

func (c *credit) giveBack(tokens uint32) { c.due += tokens }

// renew adapts to a resumption: the server counts the start's credit anew from the last token that came. The result is
// what has to be granted on top, so that nothing granted by hand is lost.
func (c *credit) renew(manual bool) uint32 {
	c.due = 0
	c.excess = c.received - c.consumed
	atServer := c.received + uint64(c.window)
	if !manual {
		return 0
	}
	missing := max(c.granted, atServer) - atServer
	c.granted = atServer + missing
	return uint32(missing)
}
