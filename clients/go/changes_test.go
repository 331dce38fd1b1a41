package vorrang_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// Changes of priority whose link is lost before they are answered.

func changedFrame(level int32) *vorrangv1.SessionResponse {
	changed := &vorrangv1.PriorityChangedEvent{Level: level}
	return &vorrangv1.SessionResponse{Event: &vorrangv1.SessionResponse_PriorityChanged{PriorityChanged: changed}}
}

// after numbers frames of a request that come after others.
func after(sequence uint64, requestID string, frames ...*vorrangv1.SessionResponse) []*vorrangv1.SessionResponse {
	for number, frame := range frames {
		frame.RequestId, frame.Sequence = requestID, sequence+uint64(number)+1
	}
	return frames
}

// losingTheFirstChange accepts starts, and breaks the stream when it hears of the first change of priority. What it
// answers to a resumption and to each change after that is the test's.
func losingTheFirstChange(
	onResume func(id string) []*vorrangv1.SessionResponse,
	onChange func(id string, number int) []*vorrangv1.SessionResponse,
) *fake {
	numChanges := 0 // frames of one stream come one by one, and one stream after the other
	return &fake{
		answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
			switch {
			case request.GetStart() != nil:
				return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
			case request.GetResume() != nil:
				return onResume(request.GetResume().GetRequestId())
			case request.GetReprioritize() != nil:
				if numChanges++; numChanges > 1 {
					return onChange(request.GetReprioritize().GetRequestId(), numChanges-1)
				}
			}
			return nil
		},
		breaks: func(request *vorrangv1.SessionRequest) bool {
			return request.GetReprioritize() != nil && numChanges == 1
		},
	}
}

func TestAChangeOfPriorityOutlivesALossAndTakesNoAnswerThatIsAnotherOnes(t *testing.T) {
	server := losingTheFirstChange(
		func(id string) []*vorrangv1.SessionResponse { return after(1, id, changedFrame(-10)) }, // it was obeyed
		func(id string, number int) []*vorrangv1.SessionResponse {
			if number == 1 { // the change again; its answer waits for the next one, which it must not be taken for
				return nil
			}
			return after(2, id, changedFrame(-10), changedFrame(7), finishedFrame())
		})
	stream := start(t, open(t, server.serve(t), vorrang.WithAutoResume(patience)), "hello")
	for _, priority := range []struct {
		asked vorrang.Priority
		level int
	}{{vorrang.Interactive, -10}, {vorrang.Level(7), 7}} {
		changed, err := stream.Reprioritize(within(t), priority.asked)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "level", changed.Level, priority.level)
	}
	levels := []int{}
	for event, err := range stream.Events(within(t)) {
		if err != nil {
			t.Fatal(err)
		}
		if changed, ok := event.(vorrang.PriorityChanged); ok {
			levels = append(levels, changed.Level)
		}
	}
	if len(levels) != 3 || levels[0] != -10 || levels[1] != -10 || levels[2] != 7 {
		t.Errorf("the events say %v", levels)
	}
}

func TestARepeatedChangeThatComesTooLateIsAnsweredByWhatBecameOfTheFirst(t *testing.T) {
	for _, wasObeyed := range []bool{true, false} {
		server := losingTheFirstChange(
			func(string) []*vorrangv1.SessionResponse { return nil },
			func(id string, _ int) []*vorrangv1.SessionResponse {
				rejected := rejectedFrame("reprioritize", wireStatus(t, codes.NotFound, "UNKNOWN_REQUEST"))
				rejected.RequestId = id
				frames := []*vorrangv1.SessionResponse{finishedFrame()}
				if wasObeyed {
					frames = []*vorrangv1.SessionResponse{changedFrame(5), finishedFrame()}
				}
				return append([]*vorrangv1.SessionResponse{rejected}, after(1, id, frames...)...)
			})
		stream := start(t, open(t, server.serve(t), vorrang.WithAutoResume(patience)), "hello")
		changed, err := stream.Reprioritize(within(t), vorrang.Level(5))
		if wasObeyed && (err != nil || changed.Level != 5) {
			t.Errorf("obeyed: %v, %v", changed, err)
		}
		if !wasObeyed && !errors.Is(err, vorrang.ReasonUnknownRequest) {
			t.Errorf("not obeyed: %v, %v", changed, err)
		}
		result(t, stream)
	}
}

func TestAChangeThatNobodyWaitsForIsNotSaidAgain(t *testing.T) {
	heard := make(chan int32, 10)
	server := losingTheFirstChange(func(string) []*vorrangv1.SessionResponse { return nil }, nil)
	breaks, gone := server.breaks, make(chan struct{})
	server.breaks = func(request *vorrangv1.SessionRequest) bool {
		if breaks(request) {
			<-gone // its caller has left before the loss
			return true
		}
		return false
	}
	answer := server.answer
	server.answer = func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		change := request.GetReprioritize()
		if change == nil {
			return answer(request)
		}
		heard <- change.GetPriority().GetLevel()
		if change.GetPriority().GetLevel() == 4 {
			return after(1, change.GetRequestId(), changedFrame(4))
		}
		return answer(request)
	}
	stream := start(t, open(t, server.serve(t), vorrang.WithAutoResume(patience)), "hello")
	impatient, cancel := context.WithCancel(context.Background())
	go func() { <-heard; cancel() }()
	if _, err := stream.Reprioritize(impatient, vorrang.Level(3)); !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	close(gone)
	changed, err := stream.Reprioritize(within(t), vorrang.Level(4))
	if err != nil || changed.Level != 4 {
		t.Errorf("the next one: %v, %v", changed, err)
	}
	equal(t, "heard", <-heard, 4)
}

func TestAPauseThatMayBeLostIsSaidAgainAndTheLastWordCounts(t *testing.T) {
	heard, mayBreak := make(chan string, 20), make(chan struct{})
	server := &fake{
		answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
			switch {
			case request.GetPause() != nil:
				heard <- "pause"
			case request.GetUnpause() != nil:
				heard <- "unpause"
			case request.GetResume() != nil:
				heard <- "resume"
			case request.GetReprioritize() != nil:
				return after(1, request.GetReprioritize().GetRequestId(), changedFrame(3))
			}
			return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
		},
		breaks: func(request *vorrangv1.SessionRequest) bool {
			if request.GetPause() != nil || request.GetUnpause() != nil {
				_, ok := <-mayBreak
				return ok
			}
			return false
		},
	}
	session := open(t, server.serve(t))
	stream := start(t, session, "hello", vorrang.WithRequestID("a"))
	accepted(t, stream)
	if err := stream.Pause(within(t)); err != nil {
		t.Fatal(err)
	}
	mayBreak <- struct{}{}
	awaitLoss(t, session)
	go func() { mayBreak <- struct{}{} }() // lost again, after it was said again
	resume(t, session)
	awaitLoss(t, session)
	if err := stream.Unpause(within(t)); err != nil {
		t.Fatal(err)
	}
	close(mayBreak)
	resume(t, session)
	if _, err := stream.Reprioritize(within(t), vorrang.Level(3)); err != nil { // heard after all of them
		t.Fatal(err)
	}
	close(heard)
	for _, want := range []string{"pause", "resume", "pause", "resume", "unpause"} {
		equal(t, "heard", <-heard, want)
	}
	equal(t, "more", <-heard, "")
}

func TestChangesOfPriorityReachTheServerAfterTheGap(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address), vorrang.WithAutoResume(patience))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	p.shutOut(true)
	lose(t, p, session)
	time.AfterFunc(100*time.Millisecond, func() { p.shutOut(false) })
	for _, level := range []int{3, 4} {
		changed, err := stream.Reprioritize(within(t), vorrang.Level(level))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "level", changed.Level, level)
	}
	if err := stream.Cancel(within(t)); err != nil {
		t.Fatal(err)
	}
}

func TestNobodyWaitsForAChangeWhenTheGapHasNoEnd(t *testing.T) {
	for name, options := range map[string][]vorrang.SessionOption{
		"resumed by hand": nil,
		"patience ends":   {vorrang.WithAutoResume(300 * time.Millisecond)},
	} {
		numChanges := make(chan struct{}, 1)
		server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
			if request.GetReprioritize() != nil {
				numChanges <- struct{}{}
			}
			return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
		}}
		p := newProxy(t, server.listen(t))
		session := open(t, dial(t, p.address), options...)
		stream := start(t, session, "hello", vorrang.WithRequestID("a"))
		go func() {
			<-numChanges
			p.shutOut(true)
			p.cut()
		}()
		if _, err := stream.Reprioritize(within(t), vorrang.Batch); !errors.Is(err, vorrang.ErrDisconnected) {
			t.Errorf("%s: an awaited change: %v", name, err)
		}
		if _, err := stream.Reprioritize(within(t), vorrang.Batch); !errors.Is(err, vorrang.ErrDisconnected) {
			t.Errorf("%s: another: %v", name, err)
		}
	}
}

func TestAChangeUnderWayEndsWithItsSession(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
	}}
	session := open(t, server.serve(t), vorrang.WithAutoResume(patience))
	stream := start(t, session, "hello")
	accepted(t, stream)
	time.AfterFunc(50*time.Millisecond, func() { _ = session.Close() })
	if _, err := stream.Reprioritize(within(t), vorrang.Batch); err == nil {
		t.Error("it was answered")
	}
}
