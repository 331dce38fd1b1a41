package vorrang

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
)

// resumeWait lies between two attempts to resume, unless the server says how long to wait.
const resumeWait = 200 * time.Millisecond

// lost is called by the receiving goroutine once its link has ended.
func (s *Session) lost(link *link) {
	s.mu.Lock()
	streams := slices.Collect(maps.Values(s.streams))
	// Who has taken the session over is not to lose it again to this one.
	taken := errors.Is(link.err, ReasonSessionState)
	helped := s.settings.patience > 0 && s.link == link && !s.closed && !taken
	if helped {
		s.helpers.Go(s.help)
	}
	s.mu.Unlock()
	for _, stream := range streams {
		stream.disconnect(link, helped)
	}
}

// help resumes in the place of the session's user, and tells the readers when that fails.
func (s *Session) help() {
	if s.resumeWithin(s.life) == nil {
		return
	}
	s.mu.Lock()
	streams := slices.Collect(maps.Values(s.streams))
	s.mu.Unlock()
	for _, stream := range streams {
		stream.giveUp()
	}
}

// Resume takes up a session that has lost its gRPC stream, with all its requests: readers go on without a gap or a
// repetition. It tries until the server can be reached, or ctx ends. Harmless when nothing is lost.
//
// The error is of [ReasonResumeOutOfRange] when the server does not hold the session any more: requests that had begun
// are lost then, and the session goes on without them, under another token. A single request whose events are no longer
// held fails alone.
func (s *Session) Resume(ctx context.Context) error {
	select {
	case s.resuming <- struct{}{}:
		defer func() { <-s.resuming }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	var last error
	for {
		select {
		case <-s.current().done:
		default:
			return nil
		}
		err := s.resumeOnce(ctx)
		var answer *Error
		switch {
		case err == nil:
			return nil
		case s.life.Err() != nil:
			return ErrSessionClosed
		case ctx.Err() != nil && last != nil:
			return fmt.Errorf("%w; before that: %w", ctx.Err(), last)
		case !errors.As(err, &answer) || !answer.passes():
			return err
		}
		last = err
		select {
		case <-ctx.Done():
		case <-time.After(max(answer.RetryAfter, resumeWait)):
		}
	}
}

// resumeWithin resumes as long as the session's patience lasts.
func (s *Session) resumeWithin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.settings.patience)
	defer cancel()
	return s.Resume(ctx)
}

func (s *Session) resumeOnce(ctx context.Context) error {
	token := s.Info().Token
	if token == "" {
		return &Error{Code: codes.FailedPrecondition, Message: "the server does not offer to resume sessions"}
	}
	s.current().stop()
	link, info, err := s.open(ctx, token)
	var gone error
	if errors.Is(err, ReasonResumeOutOfRange) { // as is usual for a session that had no requests
		if s.failBegun(err) {
			gone = err
		}
		link, info, err = s.open(ctx, "")
	}
	if err != nil {
		return err
	}
	streams, err := s.switchTo(link, info)
	for _, stream := range streams {
		if err == nil {
			err = stream.rebind(ctx, link)
		}
	}
	if err != nil {
		link.stop()
		for _, stream := range streams {
			stream.disconnect(link, s.settings.patience > 0)
		}
		return err
	}
	return gone
}

// failBegun fails the requests that the server has answered, and says whether there were any. The others can be started
// in another session.
func (s *Session) failBegun(err error) bool {
	s.mu.Lock()
	streams := slices.Collect(maps.Values(s.streams))
	s.mu.Unlock()
	found := false
	for _, stream := range streams {
		if stream.failBegun(err) {
			s.remove(stream)
			found = true
		}
	}
	return found
}

// switchTo makes a link the session's, and says which streams have to be taken up on it.
func (s *Session) switchTo(link *link, info SessionInfo) ([]*Stream, error) {
	s.switching.Lock()
	defer s.switching.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrSessionClosed
	}
	s.link, s.info = link, info
	streams := slices.Collect(maps.Values(s.streams))
	for _, stream := range streams {
		stream.moveTo(link)
	}
	return streams, nil
}
