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

// Pause stops the computation and keeps the request's place; what was produced is still sent.
func (s *Stream) Pause(ctx context.Context) error {
	pause := &vorrangv1.PauseCommand{RequestId: s.id}
	return s.command(ctx, &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Pause{Pause: pause}})
}

// Unpause lifts a pause.
func (s *Stream) Unpause(ctx context.Context) error {
	unpause := &vorrangv1.UnpauseCommand{RequestId: s.id}
	return s.command(ctx, &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Unpause{Unpause: unpause}})
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
// The error is of [ReasonSessionLimit], with RetryAfter, when it comes too often, and of [ReasonUnknownRequest] when
// the request has ended.
func (s *Stream) Reprioritize(ctx context.Context, priority Priority) (PriorityChanged, error) {
	answer := make(chan acknowledgement, 1)
	if err := s.sendChange(ctx, priority, answer); err != nil {
		return PriorityChanged{}, err
	}
	select {
	case acknowledged := <-answer:
		return acknowledged.event, acknowledged.err
	case <-ctx.Done():
		return PriorityChanged{}, ctx.Err()
	}
}

// sendChange sends a change of priority, so that answers come in the order of changes.
func (s *Stream) sendChange(ctx context.Context, priority Priority, answer chan acknowledgement) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	link, err := s.link, s.lost
	if s.final != nil {
		err = endedError(s.id)
	}
	if err == nil {
		s.changes = append(s.changes, answer)
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	change := &vorrangv1.ReprioritizeCommand{RequestId: s.id, Priority: priority.wire()}
	frame := &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Reprioritize{Reprioritize: change}}
	if err := link.send(ctx, frame); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.changes) > 0 { // it is the newest, unless a loss has answered it
			s.changes = s.changes[:len(s.changes)-1]
		}
		return err
	}
	return nil
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

func creditFrame(id string, tokens uint32, acknowledged uint64) *vorrangv1.SessionRequest {
	credit := &vorrangv1.CreditCommand{RequestId: id, Tokens: tokens}
	if acknowledged > 0 {
		credit.AcknowledgedSequence = proto.Uint64(acknowledged)
	}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Credit{Credit: credit}}
}
