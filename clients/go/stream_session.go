package vorrang

import (
	"context"
	"fmt"
	"io"

	"google.golang.org/grpc/codes"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// What a session does with its streams: it hands them what arrives, and moves them from a lost link to the next.

// opening is the frame that makes the server send the events after a sequence.
func (s *Stream) opening(afterSequence uint64) *vorrangv1.SessionRequest {
	// Whether the server has heard of a request that it has not answered is not known here; the same start again
	// means the same request.
	if s.start != nil && afterSequence == 0 {
		return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Start{Start: s.start}}
	}
	resume := &vorrangv1.ResumeCommand{RequestId: s.id, AfterSequence: afterSequence}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Resume{Resume: resume}}
}

// receive takes an event from the wire; true when it was the last.
func (s *Stream) receive(frame *vorrangv1.SessionResponse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sequence := frame.GetSequence()
	if s.final != nil || sequence <= s.received {
		return false
	}
	if sequence != s.received+1 {
		s.end(&Error{
			Code:    codes.DataLoss,
			Message: fmt.Sprintf("events %d to %d of request %q are missing", s.received+1, sequence-1, s.id),
		})
		return true
	}
	s.received = sequence
	if failed := frame.GetFailed(); failed != nil {
		s.end(errorFromFailed(failed))
		return true
	}
	event := decode(frame)
	switch event := event.(type) {
	case nil: // one that a newer server sends
		return false
	case PriorityChanged:
		s.changes.answered(event)
	case Delta:
		s.credit.receive(len(event.TokenIDs))
	}
	s.put(waitingEvent{event, sequence})
	if _, ok := event.(Finished); ok {
		s.end(io.EOF)
		return true
	}
	return false
}

// put lets an event wait, joined with the one before it where that says the same in less.
func (s *Stream) put(next waitingEvent) {
	if len(s.waiting) > 0 {
		last := &s.waiting[len(s.waiting)-1]
		if event, ok := joined(last.event, next.event); ok {
			*last = waitingEvent{event, next.sequence}
			return
		}
	}
	s.waiting = append(s.waiting, next)
	s.wake()
}

func joined(last, next Event) (Event, bool) {
	switch next := next.(type) {
	case QueueUpdate:
		_, ok := last.(QueueUpdate)
		return next, ok
	case Delta:
		last, ok := last.(Delta)
		if !ok || last.OutputIndex != next.OutputIndex {
			return nil, false
		}
		last.Text += next.Text
		last.TokenIDs = append(last.TokenIDs, next.TokenIDs...)
		last.Logprobs = append(last.Logprobs, next.Logprobs...)
		return last, true
	}
	return nil, false
}

// end makes sure that nothing more can come. The lock is held.
func (s *Stream) end(err error) {
	if s.final != nil {
		return
	}
	s.final = err
	s.changes.end(endedError(s.id))
	if s.release != nil {
		s.release()
	}
	s.wake()
}

// fail ends it because its session has ended.
func (s *Stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes.end(err)
	s.end(err)
}

// failBegun ends it if the server has answered it; true when that is so.
func (s *Stream) failBegun(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start != nil && s.received == 0 {
		return false
	}
	s.end(err)
	return true
}

// reject ends it because its start or its resumption was not obeyed; true when that is so.
func (s *Stream) reject(command string, err *Error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if command == "start" && s.received > 0 {
		return false // that was another start of the same id
	}
	s.end(err)
	return true
}

// rejectChange says that a change of priority was not obeyed.
func (s *Stream) rejectChange(err *Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes.rejected(err)
}

// disconnect says that a link has ended, and whether readers and changes of priority wait for the next one; harmless
// when the stream is on another.
func (s *Stream) disconnect(link *link, patient bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link != link || s.lost != nil || s.final != nil {
		return
	}
	s.patient = patient
	s.lost = errorFromLoss(link.err)
	if !patient {
		s.changes.end(s.lost)
	}
	s.wake()
}

// giveUp lets nobody wait any more for a gRPC stream, if there is none.
func (s *Stream) giveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.patient = false
	if s.lost != nil {
		s.changes.end(s.lost)
	}
	s.wake()
}

// moveTo puts the stream on a new link; it counts as lost until rebind.
func (s *Stream) moveTo(link *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link = link
}

// rebind takes the request up on its new link.
func (s *Stream) rebind(ctx context.Context, link *link) error {
	s.mu.Lock()
	if s.final != nil {
		s.mu.Unlock()
		return nil
	}
	frames := []*vorrangv1.SessionRequest{s.opening(s.received)}
	if missing := s.credit.renew(s.manual); missing > 0 {
		frames = append(frames, creditFrame(s.id, missing, s.read))
	}
	s.mu.Unlock()
	for _, frame := range frames {
		if err := link.send(ctx, frame); err != nil {
			return err
		}
	}
	if err := s.repeat(ctx, link); err != nil {
		return err
	}
	s.mu.Lock()
	cancelled := s.cancelled
	s.mu.Unlock()
	select {
	case <-link.done:
		s.disconnect(link, s.session.settings.patience > 0)
	default:
	}
	if cancelled {
		return link.send(ctx, cancelFrame(s.id))
	}
	return nil
}

// repeat says on a new link what was lost with another, and what was asked for meanwhile. Then the stream is no longer
// lost.
func (s *Stream) repeat(ctx context.Context, link *link) error {
	for {
		s.mu.Lock()
		frames := s.unsaid(link)
		if len(frames) == 0 {
			// Only now may readers grant credit: what came before the resumption would be forgotten by it.
			s.lost = nil
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		for _, frame := range frames {
			if err := link.send(ctx, frame); err != nil {
				return err
			}
		}
	}
}

func (s *Stream) unsaid(link *link) []*vorrangv1.SessionRequest {
	frames := s.changes.unsaid(s.id, link)
	if s.pauseSaid && s.pauseLink != link {
		s.pauseLink = link
		frames = append(frames, pauseFrame(s.id, s.paused))
	}
	return frames
}
