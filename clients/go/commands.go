package vorrang

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// Cancel asks the server to end the request; its events end with [Finished] for [FinishCancelled], unless something
// else ended it first. Harmless when it has ended. What a lost gRPC stream can't tell the server, the next one does.
func (s *Stream) Cancel(ctx context.Context) error {
	s.mu.Lock()
	s.cancelled = true
	s.mu.Unlock()
	err := s.command(ctx, cancelFrame(s.id))
	if errors.Is(err, ErrDisconnected) {
		return nil
	}
	return err
}

// Pause stops the computation and keeps the request's place; what was produced is still sent. What a lost gRPC stream
// can't tell the server, the next one does.
func (s *Stream) Pause(ctx context.Context) error { return s.pause(ctx, true) }

// Unpause lifts a pause, as Pause makes one.
func (s *Stream) Unpause(ctx context.Context) error { return s.pause(ctx, false) }

func (s *Stream) pause(ctx context.Context, paused bool) error {
	s.mu.Lock()
	s.paused, s.pauseSaid, s.pauseLink = paused, true, nil
	if s.lost == nil {
		s.pauseLink = s.link
	}
	s.mu.Unlock()
	err := s.command(ctx, pauseFrame(s.id, paused))
	if errors.Is(err, ErrDisconnected) {
		return nil
	}
	return err
}

// Credit lets a request with [WithManualCredit] produce so many tokens more.
func (s *Stream) Credit(ctx context.Context, tokens uint32) error {
	if !s.manual {
		return &Error{
			Code: codes.FailedPrecondition, Message: fmt.Sprintf("the credit of request %q is granted by itself", s.id),
		}
	}
	s.mu.Lock()
	s.credit.granted += uint64(tokens)
	frame := creditFrame(s.id, tokens, s.read)
	s.mu.Unlock()
	err := s.command(ctx, frame)
	if err != nil {
		s.mu.Lock()
		s.credit.granted -= uint64(tokens)
		s.mu.Unlock()
	}
	return err
}

// Reprioritize changes the priority of the request, queued or running, and waits for the level in force.
//
// With [WithAutoResume] it outlives the loss of the gRPC stream: the next one says it again. Without, the error is
// [ErrDisconnected], and whether the server obeyed is not known.
//
// The error is of [ReasonSessionLimit], with RetryAfter, when it comes too often, and of [ReasonUnknownRequest] when
// the request has ended.
func (s *Stream) Reprioritize(ctx context.Context, priority Priority) (PriorityChanged, error) {
	change := newChange(priority)
	if err := s.sendChange(ctx, change); err != nil {
		return PriorityChanged{}, err
	}
	select {
	case acknowledged := <-change.answer:
		return acknowledged.event, acknowledged.err
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		s.changes.leave(change)
		return PriorityChanged{}, ctx.Err()
	}
}

// sendChange sends a change of priority, so that answers come in the order of changes; or leaves it to the next link.
func (s *Stream) sendChange(ctx context.Context, change *change) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	link, err := s.admit(change)
	if link == nil || err != nil {
		return err
	}
	err = link.send(ctx, change.frame(s.id))
	if err == nil || errors.Is(err, ErrDisconnected) {
		return nil // the loss answers it, or the next link says it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes.withdraw(change)
	return err
}

// admit lets a change wait for its answer; the link is the one to be told, nil while there is none.
func (s *Stream) admit(change *change) (*link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.final != nil {
		return nil, endedError(s.id)
	}
	if s.lost != nil && !s.patient {
		return nil, s.lost
	}
	s.changes.waiting = append(s.changes.waiting, change)
	if s.lost == nil {
		change.link = s.link
	}
	return change.link, nil
}

// command sends a frame about the request, unless it has ended.
func (s *Stream) command(ctx context.Context, frame *vorrangv1.SessionRequest) error {
	s.mu.Lock()
	link, lost, ended := s.link, s.lost, s.final != nil
	s.mu.Unlock()
	if ended {
		return nil
	}
	if lost != nil {
		return lost
	}
	return link.send(ctx, frame)
}

func endedError(id string) *Error {
	return &Error{
		Code: codes.NotFound, Reason: ReasonUnknownRequest, Message: fmt.Sprintf("request %q has ended", id),
	}
}

func cancelFrame(id string) *vorrangv1.SessionRequest {
	cancel := &vorrangv1.CancelCommand{RequestId: id}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Cancel{Cancel: cancel}}
}

func pauseFrame(id string, paused bool) *vorrangv1.SessionRequest {
	if !paused {
		unpause := &vorrangv1.UnpauseCommand{RequestId: id}
		return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Unpause{Unpause: unpause}}
	}
	pause := &vorrangv1.PauseCommand{RequestId: id}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Pause{Pause: pause}}
}

func creditFrame(id string, tokens uint32, acknowledged uint64) *vorrangv1.SessionRequest {
	credit := &vorrangv1.CreditCommand{RequestId: id, Tokens: tokens}
	if acknowledged > 0 {
		credit.AcknowledgedSequence = proto.Uint64(acknowledged)
	}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Credit{Credit: credit}}
}
