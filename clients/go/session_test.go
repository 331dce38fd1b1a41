package vorrang_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

func temperature(value float32) *vorrangv1.SamplingParams {
	return &vorrangv1.SamplingParams{Temperature: proto.Float32(value)}
}

func TestARequestStreamsItsEventsToTheEnd(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	stream := start(t, session, "hello", vorrang.WithMaxTokens(12))
	var kinds []string
	var text string
	var finished vorrang.Finished
	for event, err := range stream.Events(within(t)) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case vorrang.Delta:
			equal(t, "index", event.FirstTokenIndex, len(text))
			text += event.Text
			continue
		case vorrang.Finished:
			finished = event
		}
		kinds = append(kinds, fmt.Sprintf("%T", event))
	}
	equal(t, "events", fmt.Sprint(kinds), "[vorrang.Accepted vorrang.Started vorrang.Finished]")
	equal(t, "text", text, scripted("hello", 12))
	equal(t, "reason", finished.Reason, vorrang.FinishLength)
	equal(t, "output", finished.Usage.OutputTokens, 12)
	equal(t, "prompt", finished.Usage.PromptTokens, 5)
	if _, err := stream.Recv(within(t)); !errors.Is(err, io.EOF) {
		t.Errorf("after the end comes %v", err)
	}
	if err := stream.Cancel(within(t)); err != nil {
		t.Errorf("a cancel after the end: %v", err)
	}
}

func TestCancelEndsARequestWithWhatItHas(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(3), vorrang.WithMaxTokens(500))
	readTokens(t, stream, 3)
	for range 3 {
		if err := stream.Cancel(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	finished := result(t, stream).Finished
	equal(t, "reason", finished.Reason, vorrang.FinishCancelled)
	equal(t, "output", finished.Usage.OutputTokens, 3)
	othersGoOn(t, session)
}

func TestTheEndOfAContextCancelsOnTheServer(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := session.Start(ctx, greedy("hello"), vorrang.WithManualCredit(3))
	if err != nil {
		t.Fatal(err)
	}
	readTokens(t, stream, 3)
	cancel()
	equal(t, "reason", result(t, stream).Finished.Reason, vorrang.FinishCancelled)
	if _, err := session.Start(ctx, greedy("hello")); !errors.Is(err, context.Canceled) {
		t.Errorf("a start after the end: %v", err)
	}
}

func TestPriorityIsEchoed(t *testing.T) {
	session := open(t, dial(t, serve(t).Address), vorrang.WithDefaultPriority(vorrang.Level(7)))
	equal(t, "session", session.Info().DefaultLevel, 7)
	for _, given := range []struct {
		options []vorrang.RequestOption
		level   int
	}{
		{nil, 7},
		{[]vorrang.RequestOption{vorrang.WithPriority(vorrang.Level(-42))}, -42},
		{[]vorrang.RequestOption{vorrang.WithPriority(vorrang.Interactive)}, -10},
		{[]vorrang.RequestOption{vorrang.WithPriority(vorrang.ParsePriority("batch"))}, 10},
		{[]vorrang.RequestOption{vorrang.WithPriority(vorrang.ParsePriority("+3"))}, 3},
	} {
		stream := start(t, session, "hello", given.options...)
		first := accepted(t, stream)
		equal(t, "level", first.Level, given.level)
		equal(t, "requested", first.RequestedLevel, given.level)
		equal(t, "capped", first.Capped, false)
		equal(t, "ignored", first.PriorityIgnored, false)
		result(t, stream)
	}
}

func TestAPolicyWithoutPrioritiesSaysSo(t *testing.T) {
	session := open(t, dial(t, serve(t, "VORRANG_SCHEDULER__POLICY=fcfs").Address))
	equal(t, "policy", session.Info().Policy, "fcfs")
	equal(t, "ignored", accepted(t, start(t, session, "hello", vorrang.WithPriority(vorrang.Batch))).PriorityIgnored, true)
}

func TestReprioritizeIsAcknowledgedAndLetsAWaitingRequestOvertake(t *testing.T) {
	session := open(t, dial(t, serve(t,
		"VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1", "VORRANG_ENGINE__SCRIPTED_STEP_S=0.002").Address))
	first := start(t, session, "first", vorrang.WithPriority(vorrang.Level(-50)), vorrang.WithMaxTokens(100))
	readTokens(t, first, 1)
	second := start(t, session, "second", vorrang.WithMaxTokens(50))
	third := start(t, session, "third", vorrang.WithMaxTokens(50))
	accepted(t, second)
	equal(t, "position", accepted(t, third).QueuePosition, 1)
	changed, err := third.Reprioritize(within(t), vorrang.Interactive)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "level", changed.Level, -10)
	readTokens(t, third, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for {
		event, err := second.Recv(ctx)
		if errors.Is(err, context.Canceled) {
			break // nothing more is there
		}
		if _, ok := event.(vorrang.QueueUpdate); !ok || err != nil {
			t.Fatalf("the second was not overtaken: %#v, %v", event, err)
		}
	}
	for _, stream := range []*vorrang.Stream{second, third, first} {
		result(t, stream)
	}
	_, err = third.Reprioritize(within(t), vorrang.Batch)
	if !errors.Is(err, vorrang.ReasonUnknownRequest) {
		t.Errorf("after the end: %v", err)
	}
}

func TestAnUrgentRequestPreemptsVisibly(t *testing.T) {
	session := open(t, dial(t, serve(t,
		"VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1", "VORRANG_ENGINE__SCRIPTED_STEP_S=0.002").Address))
	report := start(t, session, "a long report", vorrang.WithPriority(vorrang.Batch), vorrang.WithMaxTokens(200))
	text := readTokens(t, report, 3)
	question := start(t, session, "a question", vorrang.WithPriority(vorrang.Interactive), vorrang.WithMaxTokens(5))
	equal(t, "question", result(t, question).Text, scripted("a question", 5))
	var preempted vorrang.Preempted
	text += until(t, report, func(event vorrang.Event, _ string) bool {
		if lost, ok := event.(vorrang.Preempted); ok {
			preempted = lost
		}
		_, resumed := event.(vorrang.Resumed)
		return resumed
	})
	equal(t, "preempted", preempted, vorrang.Preempted{Reason: vorrang.PreemptSeats, Count: 1})
	rest := result(t, report)
	equal(t, "report", text+rest.Text, scripted("a long report", 200))
	equal(t, "preemptions", rest.Finished.Usage.Preemptions, 1)
}

func TestChangesOfPriorityThatComeTooOftenSayWhenToComeBack(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(0))
	accepted(t, stream)
	numChanged := 0
	var refused *vorrang.Error
	for level := range 60 {
		changed, err := stream.Reprioritize(within(t), vorrang.Level(level))
		if err != nil {
			refused = failure(t, err)
			break
		}
		numChanged++
		equal(t, "level", changed.Level, level)
	}
	if numChanged == 0 || refused == nil {
		t.Fatalf("%d were obeyed, then %v", numChanged, refused)
	}
	equal(t, "reason", refused.Reason, vorrang.ReasonSessionLimit)
	equal(t, "retryable", refused.Retryable, true)
	if refused.RetryAfter <= 0 {
		t.Errorf("retry after %v", refused.RetryAfter)
	}
	if _, err := stream.Reprioritize(within(t), vorrang.Level(1000)); !errors.Is(err, vorrang.ReasonInvalidRequest) {
		t.Errorf("a level out of range: %v", err)
	}
}

func TestASlowReaderIsBoundedByItsCreditAndHoldsNobodyUp(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	slow := start(t, session, "slow", vorrang.WithCredit(8), vorrang.WithMaxTokens(300))
	othersGoOn(t, session)
	othersGoOn(t, session)
	accepted(t, slow)
	equal(t, "what waits", len(readTokens(t, slow, 1)), 8)
	text := scripted("slow", 8)
	for event, err := range slow.Events(within(t)) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.(type) {
		case vorrang.Delta:
			if len(event.TokenIDs) > 8 {
				t.Fatalf("%d tokens at once, granted were 8", len(event.TokenIDs))
			}
			text += event.Text
		case vorrang.Finished:
			if event.Usage.Parked <= 0 {
				t.Error("it never waited for credit")
			}
		}
	}
	equal(t, "text", text, scripted("slow", 300))
}

func TestCreditByHand(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2), vorrang.WithMaxTokens(9))
	equal(t, "first", readTokens(t, stream, 2), scripted("hello", 2))
	othersGoOn(t, session)
	if err := stream.Credit(within(t), 3); err != nil {
		t.Fatal(err)
	}
	equal(t, "second", readTokens(t, stream, 3), scripted("hello", 5)[2:])
	if err := stream.Credit(within(t), 100); err != nil {
		t.Fatal(err)
	}
	equal(t, "rest", result(t, stream).Text, scripted("hello", 9)[5:])
	if err := start(t, session, "hello").Credit(within(t), 1); err == nil {
		t.Error("credit can be granted twice")
	}
	if _, err := session.Start(within(t), greedy("hello"), vorrang.WithCredit(0)); err == nil {
		t.Error("a request that could never begin was started")
	}
}

func TestAReaderThatStaysAwayFails(t *testing.T) {
	session := open(t, dial(t, serve(t, "VORRANG_SESSION__SLOW_CLIENT_TIMEOUT_S=0.2").Address))
	_, err := start(t, session, "hello", vorrang.WithManualCredit(2)).Result(within(t))
	slow := failure(t, err)
	equal(t, "reason", slow.Reason, vorrang.ReasonSlowConsumer)
	equal(t, "retryable", slow.Retryable, false)
	equal(t, "usage", slow.Usage.OutputTokens, 2)
	othersGoOn(t, session)
}

func TestAPauseHoldsARequest(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	stream := start(t, session, "hello", vorrang.WithManualCredit(2), vorrang.WithMaxTokens(8))
	text := readTokens(t, stream, 2)
	for _, command := range []func() error{
		func() error { return stream.Pause(within(t)) },
		func() error { return stream.Credit(within(t), 100) },
	} {
		if err := command(); err != nil {
			t.Fatal(err)
		}
	}
	othersGoOn(t, session)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if event, err := stream.Recv(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("it goes on: %#v, %v", event, err)
	}
	if err := stream.Unpause(within(t)); err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+result(t, stream).Text, scripted("hello", 8))
}

func TestBudgetsAndDeadlines(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	total := start(t, session, "hello", vorrang.WithManualCredit(3), vorrang.WithTotalTimeout(100*time.Millisecond))
	ended := result(t, total)
	equal(t, "total", ended.Finished.Reason, vorrang.FinishTimeLimit)
	equal(t, "output", ended.Text, scripted("hello", 3))
	queue := start(t, session, "hello", vorrang.WithManualCredit(0), vorrang.WithQueueTimeout(50*time.Millisecond))
	equal(t, "queue", result(t, queue).Finished.Reason, vorrang.FinishTimeLimit)

	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	bounded, err := session.Start(ctx, greedy("hello"), vorrang.WithManualCredit(3))
	if err != nil {
		t.Fatal(err)
	}
	reason := result(t, bounded).Finished.Reason
	if reason != vorrang.FinishTimeLimit && reason != vorrang.FinishCancelled {
		t.Errorf("the context's deadline gives %v", reason)
	}
}

func TestManyStreamsOnOneSession(t *testing.T) {
	session := open(t, dial(t, serve(t).Address))
	const numStreams = 200
	stalled := start(t, session, "stalled", vorrang.WithCredit(4), vorrang.WithPriority(vorrang.Interactive))
	var group sync.WaitGroup
	for number := range numStreams {
		group.Go(func() {
			prompt, numTokens := fmt.Sprint("request ", number), 1+number%40
			stream, err := session.Start(context.Background(), greedy(prompt),
				vorrang.WithMaxTokens(uint32(numTokens)), vorrang.WithPriority(vorrang.Level(number%21-10)),
				vorrang.WithCredit(uint32(1+number%7)))
			if err != nil {
				t.Error(err)
				return
			}
			whole, err := stream.Result(within(t))
			if err != nil {
				t.Errorf("%s: %v", prompt, err)
				return
			}
			equal(t, prompt, whole.Text, scripted(prompt, numTokens))
		})
	}
	group.Wait()
	accepted(t, stalled)
	equal(t, "stalled", readTokens(t, stalled, 4), scripted("stalled", 4))
}

func TestADrainIsAnnouncedAndLetsRunningRequestsEnd(t *testing.T) {
	drained := serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.005", "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1")
	session := open(t, dial(t, drained.Address))
	running := start(t, session, "running", vorrang.WithMaxTokens(100), vorrang.WithPriority(vorrang.Interactive))
	text := readTokens(t, running, 1)
	waiting := start(t, session, "waiting")
	accepted(t, waiting)
	drained.Terminate()
	select {
	case <-session.GoingAway():
	case <-time.After(patience):
		t.Fatal("nothing was announced")
	}
	if left := time.Until(session.EndsAt()); left < 20*time.Second || left > 31*time.Second {
		t.Errorf("%v are left", left)
	}
	_, err := waiting.Result(within(t))
	equal(t, "waiting", failure(t, err).Reason, vorrang.ReasonDraining)
	late := start(t, session, "late")
	_, err = late.Result(within(t))
	refused := failure(t, err)
	equal(t, "late", refused.Reason, vorrang.ReasonDraining)
	equal(t, "retryable", refused.Retryable, true)
	equal(t, "running", text+result(t, running).Text, scripted("running", 100))
	select {
	case <-session.Disconnected():
	case <-time.After(patience):
		t.Fatal("the server did not end the session")
	}
	if _, err := session.Start(context.Background(), greedy("hello")); !errors.Is(err, vorrang.ErrDisconnected) ||
		!errors.Is(err, vorrang.ReasonDraining) {
		t.Errorf("a start after the end: %v", err)
	}
}

func TestNothingIsLeftBehind(t *testing.T) {
	address := serve(t).Address
	before := goleak.IgnoreCurrent()
	for _, leave := range []func(*vorrang.Session, context.CancelFunc){
		func(session *vorrang.Session, _ context.CancelFunc) { _ = session.Close() },
		func(session *vorrang.Session, cancel context.CancelFunc) { cancel(); _ = session.Close() },
	} {
		client, err := vorrang.Dial(within(t), address)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		session, err := client.Session(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var streams []*vorrang.Stream
		for number := range 20 {
			stream, err := session.Start(ctx, greedy("hello"), vorrang.WithManualCredit(uint32(number)))
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, stream)
		}
		call, err := client.GenerateStream(ctx, greedy("hello"))
		if err != nil {
			t.Fatal(err)
		}
		readTokens(t, streams[19], 1)
		leave(session, cancel)
		for _, stream := range streams {
			ended, err := stream.Result(within(t))
			if err == nil {
				equal(t, "reason", ended.Finished.Reason, vorrang.FinishCancelled)
			} else if !errors.Is(err, vorrang.ErrSessionClosed) {
				t.Errorf("a stream of a closed session: %v", err)
			}
		}
		if _, err := session.Start(context.Background(), greedy("hello")); !errors.Is(err, vorrang.ErrSessionClosed) {
			t.Errorf("a start in a closed session: %v", err)
		}
		call.Close()
		cancel()
		_ = client.Close()
	}
	goleak.VerifyNone(t, before)
}

func TestClosingASessionCancelsItsRequestsAtOnce(t *testing.T) {
	client := dial(t, serve(t, "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1", "VORRANG_ENGINE__SCRIPTED_STEP_S=0.002").Address)
	session := open(t, client)
	urgent := start(t, session, "hello", vorrang.WithPriority(vorrang.Level(-100)), vorrang.WithMaxTokens(2000))
	readTokens(t, urgent, 1)
	if err := session.Close(); err != nil {
		t.Fatal(err)
	}
	equal(t, "reason", result(t, urgent).Finished.Reason, vorrang.FinishCancelled)
	othersGoOn(t, open(t, client))
}
