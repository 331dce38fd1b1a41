package vorrang_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// The blocks of docs/clients/go.md stand in the functions called guide..., and are run here.

func guideAnswer(ctx context.Context, address string) (string, error) {
	client, err := vorrang.Dial(ctx, address)
	if err != nil {
		return "", err
	}
	defer client.Close()
	answer, err := client.Generate(ctx, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithMaxTokens(32), vorrang.WithTemperature(0))
	if err != nil {
		return "", err
	}
	return answer.Text, nil
}

func guideSession(ctx context.Context, client *vorrang.Client) (*vorrang.Session, error) {
	return client.Session(ctx,
		vorrang.WithDefaultPriority(vorrang.Standard),
		vorrang.WithAutoResume(10*time.Second))
}

func guideRequests(ctx context.Context, session *vorrang.Session) (report, question *vorrang.Stream, err error) {
	report, err = session.Start(ctx, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithPriority(vorrang.Batch), vorrang.WithMaxTokens(400), vorrang.WithTemperature(0))
	if err != nil {
		return nil, nil, err
	}
	capital := []vorrang.Message{{Role: "user", Content: "What is the capital of France?"}}
	question, err = session.Start(ctx, vorrang.Request{Messages: capital},
		vorrang.WithPriority(vorrang.Interactive), vorrang.WithMaxTokens(16), vorrang.WithTemperature(0))
	return report, question, err
}

func guideEvents(ctx context.Context, out io.Writer, stream *vorrang.Stream) error {
	for event, err := range stream.Events(ctx) {
		if err != nil {
			return err
		}
		switch event := event.(type) {
		case vorrang.Accepted:
			fmt.Fprintf(out, "[level %d]", event.Level)
		case vorrang.QueueUpdate:
			fmt.Fprintf(out, "[%d before it]", event.QueuePosition)
		case vorrang.Delta:
			fmt.Fprint(out, event.Text)
		case vorrang.Preempted:
			fmt.Fprint(out, "[somebody more urgent is served]")
		case vorrang.Finished:
			fmt.Fprintf(out, "[%s, %d tokens]", event.Reason, event.Usage.OutputTokens)
		}
	}
	return nil
}

func guideUrgent(ctx context.Context, stream *vorrang.Stream) (int, error) {
	changed, err := stream.Reprioritize(ctx, vorrang.Level(-20))
	if err != nil {
		return 0, err
	}
	return changed.Level, nil
}

func guideCancel(ctx context.Context, stream *vorrang.Stream) (*vorrang.Result, error) {
	if err := stream.Cancel(ctx); err != nil {
		return nil, err
	}
	return stream.Result(ctx) // what it had produced; Finished.Reason is FinishCancelled
}

func guideDeadline(ctx context.Context, session *vorrang.Session) (*vorrang.Result, error) {
	bounded, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	stream, err := session.Start(bounded, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithMaxTokens(1500), vorrang.WithQueueTimeout(time.Second))
	if err != nil {
		return nil, err
	}
	return stream.Result(ctx) // ends with FinishTimeLimit or FinishCancelled, and what there was
}

func guideSlowly(ctx context.Context, session *vorrang.Session, work func(text string)) error {
	stream, err := session.Start(ctx, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithCredit(16), vorrang.WithMaxTokens(100), vorrang.WithTemperature(0))
	if err != nil {
		return err
	}
	for event, err := range stream.Events(ctx) {
		if err != nil {
			return err
		}
		if delta, ok := event.(vorrang.Delta); ok {
			work(delta.Text) // may take its time: at most 16 tokens wait meanwhile
		}
	}
	return nil
}

func guideSeveral(ctx context.Context, out io.Writer, client *vorrang.Client) error {
	result, err := client.Generate(ctx, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithOutputs(3), vorrang.WithLogprobs(2), vorrang.WithMaxTokens(12))
	if err != nil {
		return err
	}
	for _, output := range result.Outputs {
		logprob := float32(0)
		for _, position := range output.Logprobs {
			logprob += position.GetSampled().GetLogprob()
		}
		fmt.Fprintf(out, "%.1f %s\n", logprob, output.Text)
	}
	return nil
}

func guideChoose(ctx context.Context, client *vorrang.Client) (string, error) {
	answer, err := client.Generate(ctx, vorrang.Request{Prompt: "Is the earth flat? Answer:"},
		vorrang.WithChoice(" yes", " no"))
	if err != nil {
		return "", err
	}
	return answer.Text, nil
}

func guideResume(ctx context.Context, session *vorrang.Session, stream *vorrang.Stream) (string, error) {
	var text strings.Builder
	for {
		event, err := stream.Recv(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return text.String(), nil
		case errors.Is(err, vorrang.ErrDisconnected):
			if err := session.Resume(ctx); err != nil {
				return text.String(), err
			}
		case err != nil:
			return text.String(), err
		}
		if delta, ok := event.(vorrang.Delta); ok {
			text.WriteString(delta.Text)
		}
	}
}

func guideTakeOver(
	ctx context.Context, client *vorrang.Client, token, requestID string, lastSequence uint64,
) (*vorrang.Stream, error) {
	session, err := client.Session(ctx, vorrang.WithSessionToken(token))
	if err != nil {
		return nil, err
	}
	return session.Attach(ctx, requestID, lastSequence)
}

func guideErrors(err error) string {
	var failed *vorrang.Error
	switch {
	case err == nil:
		return "fine"
	case errors.Is(err, vorrang.ReasonInvalidRequest) && errors.As(err, &failed):
		return failed.Violations[0].Field + " " + failed.Violations[0].Description
	case errors.Is(err, vorrang.ErrDisconnected):
		return "resume the session"
	case errors.As(err, &failed) && failed.Retryable:
		return fmt.Sprintf("try again in %v", failed.RetryAfter)
	default:
		return err.Error()
	}
}

func guideSecure(ctx context.Context, address, folder, token string) (*vorrang.Client, error) {
	authority, err := os.ReadFile(filepath.Join(folder, "ca.pem"))
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(authority)
	return vorrang.Dial(ctx, address, vorrang.WithTLS(config), vorrang.WithToken(token))
}

func guideMutual(config *tls.Config, folder string) error {
	own, err := tls.LoadX509KeyPair(filepath.Join(folder, "acme.pem"), filepath.Join(folder, "acme.key"))
	if err != nil {
		return err
	}
	config.Certificates = []tls.Certificate{own}
	return nil
}

func TestTheGuidesFirstProgramsWork(t *testing.T) {
	t.Parallel() // it waits more than it computes
	ctx, address := within(t), serve(t, "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1",
		"VORRANG_ENGINE__SCRIPTED_STEP_S=0.003").Address
	answer, err := guideAnswer(ctx, address)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "answer", answer, scripted("Once upon a time", 32))
	several := &strings.Builder{}
	if err := guideSeveral(ctx, several, dial(t, address)); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^(-\d+\.\d .{12}\n){3}$`).MatchString(several.String()) {
		t.Errorf("several outputs: %q", several)
	}
	if chosen, err := guideChoose(ctx, dial(t, address)); err != nil || chosen != " yes" && chosen != " no" {
		t.Errorf("a choice: %q, %v", chosen, err)
	}

	session, err := guideSession(ctx, dial(t, address))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = session.Close() })
	report, question, err := guideRequests(ctx, session)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := guideEvents(ctx, &out, question); err != nil {
		t.Fatal(err)
	}
	text := scripted("user: What is the capital of France?\nassistant: ", 16)
	equal(t, "question", out.String(), "[level -10]"+text+"[LENGTH, 16 tokens]")
	level, err := guideUrgent(ctx, report)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "level", level, -20)
	equal(t, "report", result(t, report).Text, scripted("Once upon a time", 400))

	doomed := start(t, session, "doomed", vorrang.WithMaxTokens(1500))
	readTokens(t, doomed, 1)
	ended, err := guideCancel(ctx, doomed)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "cancelled", ended.Finished.Reason, vorrang.FinishCancelled)
	bounded, err := guideDeadline(ctx, session)
	if err != nil {
		t.Fatal(err)
	}
	if reason := bounded.Finished.Reason; reason != vorrang.FinishTimeLimit && reason != vorrang.FinishCancelled {
		t.Errorf("the deadline ended it with %s", reason)
	}
	slow := ""
	if err := guideSlowly(ctx, session, func(text string) { slow += text }); err != nil {
		t.Fatal(err)
	}
	equal(t, "slow", slow, scripted("Once upon a time", 100))
}

func TestTheGuidesWaysThroughALossWork(t *testing.T) {
	t.Parallel() // it waits more than it computes
	p := newProxy(t, serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.005").Address)
	ctx, client := within(t), dial(t, p.address)
	session := open(t, client)
	stream := start(t, session, "lost", vorrang.WithMaxTokens(200))
	text := readTokens(t, stream, 10)
	lose(t, p, session)
	rest, err := guideResume(ctx, session, stream)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+rest, scripted("lost", 200))

	stream = start(t, session, "taken over", vorrang.WithMaxTokens(200))
	text = readTokens(t, stream, 10)
	again, err := guideTakeOver(ctx, client, session.Info().Token, stream.ID(), stream.LastSequence())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "taken over", text+result(t, again).Text, scripted("taken over", 200))
}

func TestTheGuidesErrorsAreTold(t *testing.T) {
	t.Parallel() // it waits more than it computes
	client := dial(t, serve(t, "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1",
		"VORRANG_SCHEDULER__MAX_WAITING_REQUESTS=1", "VORRANG_ENGINE__SCRIPTED_STEP_S=0.005").Address)
	equal(t, "none", guideErrors(nil), "fine")
	_, err := client.Generate(within(t), greedy("hello"), vorrang.WithTemperature(-1))
	if said := guideErrors(err); !strings.HasPrefix(said, "sampling.temperature must be") {
		t.Errorf("an invalid request: %q", said)
	}
	_, err = client.Generate(within(t), greedy(""))
	equal(t, "empty", guideErrors(err), err.Error())
	session := open(t, client)
	readTokens(t, start(t, session, "runs", vorrang.WithMaxTokens(1900)), 1)
	accepted(t, start(t, session, "waits", vorrang.WithMaxTokens(5)))
	_, err = client.Generate(within(t), greedy("refused"))
	equal(t, "full", errors.Is(err, vorrang.ReasonQueueFull), true)
	if said := guideErrors(err); !strings.HasPrefix(said, "try again in ") {
		t.Errorf("a full queue: %q", said)
	}
}

func TestTheGuidesCredentialsAreTaken(t *testing.T) {
	t.Parallel() // it waits more than it computes
	server, folder := serveTLS(t)
	client, err := guideSecure(within(t), server.Address, folder, acmeToken)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	capped(t, client)
	config := &tls.Config{}
	if err := guideMutual(config, folder); err != nil {
		t.Fatal(err)
	}
	equal(t, "certificates", len(config.Certificates), 1)
}
