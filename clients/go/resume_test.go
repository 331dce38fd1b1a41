package vorrang_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// resume takes a session up again.
func resume(t *testing.T, session *vorrang.Session) {
	t.Helper()
	if err := session.Resume(within(t)); err != nil {
		t.Fatal(err)
	}
}

// lose cuts the connection and waits until the session knows.
func lose(t *testing.T, p *proxy, session *vorrang.Session) {
	t.Helper()
	p.cut()
	awaitLoss(t, session)
}

func awaitLoss(t *testing.T, session *vorrang.Session) {
	t.Helper()
	select {
	case <-session.Disconnected():
	case <-time.After(patience):
		t.Fatal("the loss was not seen")
	}
}

func TestALostSessionGoesOnWithoutGapOrRepetition(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address))
	token := session.Info().Token
	stream := start(t, session, "hello", vorrang.WithCredit(6), vorrang.WithMaxTokens(60))
	byHand := start(t, session, "by hand", vorrang.WithManualCredit(1), vorrang.WithMaxTokens(30))
	handText := readTokens(t, byHand, 1)
	if err := errors.Join(byHand.Pause(within(t)), byHand.Credit(within(t), 29)); err != nil {
		t.Fatal(err)
	}
	text := readTokens(t, stream, 3)
	for range 3 {
		lose(t, p, session)
		rest := ""
		for {
			event, err := stream.Recv(within(t))
			if err != nil {
				lost := failure(t, err)
				equal(t, "disconnected", errors.Is(err, vorrang.ErrDisconnected), true)
				equal(t, "retryable", lost.Retryable, true)
				break
			}
			if delta, ok := event.(vorrang.Delta); ok {
				rest += delta.Text
			}
		}
		if _, err := session.Start(within(t), greedy("hello")); !errors.Is(err, vorrang.ErrDisconnected) {
			t.Errorf("a start without a stream: %v", err)
		}
		if _, err := stream.Reprioritize(within(t), vorrang.Batch); !errors.Is(err, vorrang.ErrDisconnected) {
			t.Errorf("a command without a stream: %v", err)
		}
		resume(t, session)
		equal(t, "token", session.Info().Token, token)
		text += rest + readTokens(t, stream, 7)
	}
	equal(t, "text", text+result(t, stream).Text, scripted("hello", 60))
	if err := byHand.Unpause(within(t)); err != nil {
		t.Fatal(err)
	}
	equal(t, "by hand", handText+result(t, byHand).Text, scripted("by hand", 30))
	othersGoOn(t, session)
}

// survivor is a session whose losses its users sit out.
type survivor struct {
	*vorrang.Session
	mu      sync.Mutex
	resumed chan struct{} // closed and made anew by every resumption
}

func (s *survivor) nextResumption() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resumed
}

func (s *survivor) wasResumed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.resumed)
	s.resumed = make(chan struct{})
}

// through does something again after every resumption until it does not fail for a loss.
func (s *survivor) through(ctx context.Context, do func() error) error {
	for {
		resumed := s.nextResumption()
		err := do()
		if !errors.Is(err, vorrang.ErrDisconnected) {
			return err
		}
		select {
		case <-resumed:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// run starts a request, reads all of it and changes its priority on the way.
func (s *survivor) run(ctx context.Context, prompt string, options ...vorrang.RequestOption) (string, error) {
	var stream *vorrang.Stream
	if err := s.through(ctx, func() (err error) {
		stream, err = s.Start(context.Background(), greedy(prompt), options...)
		return err
	}); err != nil {
		return "", fmt.Errorf("start: %w", err)
	}
	text := ""
	err := s.through(ctx, func() (err error) {
		for event, failed := range stream.Events(ctx) {
			err = failed
			if delta, ok := event.(vorrang.Delta); ok {
				if text += delta.Text; len(text) > 50 && len(text) < 60 {
					_, _ = stream.Reprioritize(ctx, vorrang.Level(len(text)-50)) // may be lost, or too late
				}
			}
		}
		return err
	})
	return text, err
}

func TestManyStreamsSurviveManyLosses(t *testing.T) {
	p := newProxy(t, serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.001").Address)
	session := &survivor{Session: open(t, dial(t, p.address)), resumed: make(chan struct{})}
	var users sync.WaitGroup
	for user := range 16 {
		users.Go(func() {
			for number := range 6 {
				prompt := fmt.Sprintf("request %d of %d", number, user)
				text, err := session.run(within(t), prompt,
					vorrang.WithCredit(uint32(1+user)), vorrang.WithMaxTokens(uint32(20+10*user)))
				if err != nil {
					t.Errorf("%s: %v", prompt, err)
				}
				equal(t, prompt, text, scripted(prompt, 20+10*user))
			}
		})
	}
	ended := make(chan struct{})
	go func() { users.Wait(); close(ended) }()
	for numLosses := 0; ; numLosses++ {
		select {
		case <-ended:
			if numLosses < 2 {
				t.Errorf("only %d losses", numLosses)
			}
			t.Logf("%d losses", numLosses)
			return
		case <-time.After(50 * time.Millisecond):
		}
		lose(t, p, session.Session)
		resume(t, session.Session)
		session.wasResumed()
	}
}

func TestACancelDuringALossIsObeyedAfterIt(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address))
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := session.Start(ctx, greedy("hello"), vorrang.WithManualCredit(2))
	if err != nil {
		t.Fatal(err)
	}
	other := start(t, session, "other", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	readTokens(t, other, 2)
	lose(t, p, session)
	cancel()
	if err := other.Cancel(within(t)); err != nil {
		t.Error(err)
	}
	resume(t, session)
	equal(t, "context", result(t, stream).Finished.Reason, vorrang.FinishCancelled)
	equal(t, "command", result(t, other).Finished.Reason, vorrang.FinishCancelled)
}

func TestARequestIsTakenUpByAnotherProgram(t *testing.T) {
	address, id := serve(t).Address, rand.Text()
	p := newProxy(t, address)
	first := open(t, dial(t, p.address))
	stream := start(t, first, "hello", vorrang.WithRequestID(id), vorrang.WithCredit(5), vorrang.WithMaxTokens(40))
	text := readTokens(t, stream, 2)
	lose(t, p, first)

	second := open(t, dial(t, address), vorrang.WithSessionToken(first.Info().Token))
	again, err := second.Attach(within(t), id, stream.LastSequence(), vorrang.WithCredit(5))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+result(t, again).Text, scripted("hello", 40))
	unknown, err := second.Attach(within(t), "nobody else", 3)
	if err != nil {
		t.Fatal(err)
	}
	_, err = unknown.Recv(within(t))
	equal(t, "unknown", failure(t, err).Reason, vorrang.ReasonUnknownRequest)
}

func TestTheSameStartAgainMeansTheSameRequest(t *testing.T) {
	client := dial(t, serve(t).Address)
	request := vorrang.Request{Prompt: "hello", Sampling: temperature(1)} // its seed is drawn once
	options := []vorrang.RequestOption{vorrang.WithRequestID(rand.Text()), vorrang.WithMaxTokens(10)}
	first := open(t, client)
	stream, err := first.Start(context.Background(), request, options...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Start(context.Background(), request, options...); !errors.Is(err, vorrang.ReasonDuplicateRequestID) {
		t.Errorf("alive twice: %v", err)
	}
	whole := result(t, stream)
	again, err := open(t, client).Start(context.Background(), request, options...)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "seed", accepted(t, again).Seed, whole.Accepted.Seed)
	equal(t, "text", result(t, again).Text, whole.Text)
	request.Prompt = "another"
	other, err := open(t, client).Start(context.Background(), request, options...)
	if err != nil {
		t.Fatal(err)
	}
	_, err = other.Result(within(t))
	equal(t, "another", failure(t, err).Reason, vorrang.ReasonDuplicateRequestID)
}

func TestWhatTheServerNoLongerHoldsIsLost(t *testing.T) {
	p := newProxy(t, serve(t, "VORRANG_SESSION__RESUME_GRACE_S=0.05").Address)
	session := open(t, dial(t, p.address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	lose(t, p, session)
	time.Sleep(200 * time.Millisecond) // the grace is the server's
	equal(t, "resume", failure(t, session.Resume(within(t))).Reason, vorrang.ReasonResumeOutOfRange)
	_, err := stream.Recv(within(t))
	equal(t, "stream", failure(t, err).Reason, vorrang.ReasonResumeOutOfRange)
	othersGoOn(t, session) // without what is lost
}

func TestASessionWithoutRequestsIsResumedAsANewOne(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address))
	for range 2 {
		lose(t, p, session)
		resume(t, session)
		othersGoOn(t, session)
	}
	idle := open(t, dial(t, p.address), vorrang.WithAutoResume(patience))
	lose(t, p, idle)
	othersGoOn(t, idle)
}

func TestResumingAServerThatIsGoneEndsWithTheContext(t *testing.T) {
	doomed := serve(t, "VORRANG_SERVER__GRACE_S=1")
	session := open(t, dial(t, doomed.Address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	text := readTokens(t, stream, 1)
	doomed.Kill()
	awaitLoss(t, session)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	err := session.Resume(ctx)
	equal(t, "ended", errors.Is(err, context.DeadlineExceeded), true)
	for event, failed := range stream.Events(within(t)) {
		err = failed
		if delta, ok := event.(vorrang.Delta); ok {
			text += delta.Text
		}
	}
	equal(t, "disconnected", errors.Is(err, vorrang.ErrDisconnected), true)
	if want := scripted("hello", 2); text != want[:len(text)] {
		t.Errorf("got %q, want the beginning of %q", text, want)
	}
}

func TestAServerWithoutGraceOffersNoResumption(t *testing.T) {
	p := newProxy(t, serve(t, "VORRANG_SESSION__RESUME_GRACE_S=0").Address)
	session := open(t, dial(t, p.address))
	equal(t, "token", session.Info().Token, "")
	if err := session.Resume(within(t)); err != nil {
		t.Errorf("nothing is lost: %v", err)
	}
	lose(t, p, session)
	equal(t, "code", failure(t, session.Resume(within(t))).Code, codes.FailedPrecondition)
}

func TestWithAutoResumeNobodySeesALoss(t *testing.T) {
	server := serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.001")
	before := goleak.IgnoreCurrent()
	p := newProxy(t, server.Address)
	client := dial(t, p.address)
	session := open(t, client, vorrang.WithAutoResume(patience))
	var users sync.WaitGroup
	for user := range 16 {
		users.Go(func() {
			for number := range 6 {
				prompt := fmt.Sprintf("request %d of %d", number, user)
				stream, err := session.Start(context.Background(), greedy(prompt),
					vorrang.WithCredit(uint32(1+user)), vorrang.WithMaxTokens(uint32(20+10*user)))
				if err != nil {
					t.Errorf("%s: %v", prompt, err)
					continue
				}
				// It can't have ended: it has less credit than that, and nobody reads it.
				if changed, err := stream.Reprioritize(within(t), vorrang.Level(number)); err != nil || changed.Level != number {
					t.Errorf("%s: its priority is %v, %v", prompt, changed, err)
				}
				whole, err := stream.Result(within(t))
				if err != nil {
					t.Errorf("%s: %v", prompt, err)
					continue
				}
				equal(t, prompt, whole.Text, scripted(prompt, 20+10*user))
			}
		})
	}
	ended := make(chan struct{})
	go func() { users.Wait(); close(ended) }()
	numLosses := 0
	for running := true; running; numLosses++ {
		select {
		case <-ended:
			running = false
		case <-time.After(50 * time.Millisecond):
			p.cut()
		}
	}
	if numLosses < 3 {
		t.Errorf("only %d losses", numLosses)
	}
	p.cut() // closing in the middle of a resumption leaves nothing behind either
	_ = session.Close()
	_ = client.Close()
	p.close()
	goleak.VerifyNone(t, before)
}

func TestASessionThatWasTakenOverIsNotTakenBack(t *testing.T) {
	client, id := dial(t, serve(t).Address), rand.Text()
	first := open(t, client, vorrang.WithAutoResume(patience))
	stream := start(t, first, "hello", vorrang.WithRequestID(id), vorrang.WithCredit(5), vorrang.WithMaxTokens(40))
	text := readTokens(t, stream, 2)
	second := open(t, client, vorrang.WithSessionToken(first.Info().Token))
	for {
		event, err := stream.Recv(within(t))
		if err != nil {
			equal(t, "reason", failure(t, err).Reason, vorrang.ReasonSessionState)
			equal(t, "disconnected", errors.Is(err, vorrang.ErrDisconnected), true)
			break
		}
		if delta, ok := event.(vorrang.Delta); ok {
			text += delta.Text
		}
	}
	if _, err := first.Start(context.Background(), greedy("hello")); !errors.Is(err, vorrang.ReasonSessionState) {
		t.Errorf("a start in a session that was taken over: %v", err)
	}
	again, err := second.Attach(within(t), id, stream.LastSequence(), vorrang.WithCredit(5))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+result(t, again).Text, scripted("hello", 40))
}

func TestAStartDuringALossWaitsForTheResumption(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address), vorrang.WithAutoResume(patience))
	p.shutOut(true)
	lose(t, p, session)
	time.AfterFunc(100*time.Millisecond, func() { p.shutOut(false) })
	othersGoOn(t, session)
}

func TestAReaderOfALostSessionLearnsThatItWasClosed(t *testing.T) {
	p := newProxy(t, serve(t).Address)
	session := open(t, dial(t, p.address), vorrang.WithAutoResume(patience))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	p.shutOut(true)
	lose(t, p, session)
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(within(t)); !errors.Is(err, vorrang.ErrSessionClosed) {
		t.Errorf("a reader: %v", err)
	}
	if err := session.Resume(within(t)); !errors.Is(err, vorrang.ErrSessionClosed) {
		t.Errorf("resuming: %v", err)
	}
}

func TestAutoResumeGivesUpWhenItsPatienceEnds(t *testing.T) {
	doomed := serve(t, "VORRANG_SERVER__GRACE_S=1")
	session := open(t, dial(t, doomed.Address), vorrang.WithAutoResume(300*time.Millisecond))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	doomed.Kill()
	if _, err := stream.Recv(within(t)); !errors.Is(err, vorrang.ErrDisconnected) {
		t.Errorf("a reader: %v", err)
	}
	if _, err := session.Start(within(t), greedy("hello")); !errors.Is(err, vorrang.ErrDisconnected) {
		t.Errorf("a start: %v", err)
	}
}
