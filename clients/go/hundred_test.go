package vorrang_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// TestAHundredStreamsSurviveTheLossOfTheirConnection has them on four sessions of one client, which share one TCP
// connection.
func TestAHundredStreamsSurviveTheLossOfTheirConnection(t *testing.T) {
	t.Parallel() // it waits more than it computes
	const numStreams, numTokens, cutAfter = 100, 100, 20
	server := serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.002",
		"VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=100", "VORRANG_KV__NUM_BLOCKS=4096")
	p := newProxy(t, server.Address)
	client := dial(t, p.address)
	var sessions [4]*vorrang.Session
	for i := range sessions {
		sessions[i] = open(t, client, vorrang.WithAutoResume(patience))
	}
	ctx := within(t)
	var begun, users sync.WaitGroup
	cut := make(chan struct{})
	var ended, checked atomic.Int32
	begun.Add(numStreams)
	for i := range numStreams {
		prompt := fmt.Sprintf("stream %d", i)
		// A small window keeps the server near the reader, who stops here until the cut: it is in the middle on both
		// sides.
		stream := start(t, sessions[i%len(sessions)], prompt, vorrang.WithMaxTokens(numTokens), vorrang.WithCredit(32))
		users.Go(func() {
			begin := sync.OnceFunc(begun.Done)
			defer begin()
			text, err := readWithoutGap(ctx, stream, func(got int) {
				if got >= cutAfter {
					begin()
					<-cut
				}
			})
			ended.Add(1)
			if err != nil {
				t.Errorf("%s: %v", prompt, err)
			}
			equal(t, prompt, text, scripted(prompt, numTokens))
			checked.Add(1)
		})
	}
	begun.Wait()
	equal(t, "ended before the cut", ended.Load(), 0)
	var tokens [len(sessions)]string
	var losses [len(sessions)]<-chan struct{}
	for i, session := range sessions {
		tokens[i], losses[i] = session.Info().Token, session.Disconnected()
	}
	p.cut()
	close(cut)
	users.Wait()
	equal(t, "checked", checked.Load(), numStreams)
	for i, session := range sessions {
		select {
		case <-losses[i]:
		default:
			t.Errorf("session %d lost nothing", i)
		}
		equal(t, "session", session.Info().Token, tokens[i])
	}
}

// readWithoutGap reads to the end; every delta must begin where the one before it ended.
func readWithoutGap(ctx context.Context, stream *vorrang.Stream, progress func(numTokens int)) (string, error) {
	text, numTokens := "", 0
	for event, err := range stream.Events(ctx) {
		if err != nil {
			return text, err
		}
		if delta, ok := event.(vorrang.Delta); ok {
			if delta.FirstTokenIndex != numTokens {
				return text, fmt.Errorf("token %d comes after %d", delta.FirstTokenIndex, numTokens)
			}
			text += delta.Text
			numTokens += len(delta.TokenIDs)
			progress(numTokens)
		}
	}
	return text, nil
}
