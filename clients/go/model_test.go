package vorrang_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// TestTheDefaultModelAnswersWhileAReportIsPreempted takes a real model, so it has to be asked for.
func TestTheDefaultModelAnswersWhileAReportIsPreempted(t *testing.T) {
	if os.Getenv("VORRANG_GO_MODEL") != "1" {
		t.Skip("VORRANG_GO_MODEL=1 runs this with the default model")
	}
	server := serve(t, "VORRANG_MODEL__PATH", "VORRANG_ENGINE__RUNNER=process", "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1")
	session := open(t, dial(t, server.Address))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	alone, err := session.Start(ctx, greedy("Once upon a time"), vorrang.WithMaxTokens(48))
	if err != nil {
		t.Fatal(err)
	}
	undisturbed, err := alone.Result(ctx)
	if err != nil {
		t.Fatal(err)
	}
	report, err := session.Start(ctx, greedy("Once upon a time"),
		vorrang.WithMaxTokens(48), vorrang.WithPriority(vorrang.Batch))
	if err != nil {
		t.Fatal(err)
	}
	text := readTokens(t, report, 10)
	capital := vorrang.Request{
		Messages: []vorrang.Message{{Role: "user", Content: "What is the capital of France?"}}, Sampling: temperature(0)}
	question, err := session.Start(ctx, capital, vorrang.WithMaxTokens(16), vorrang.WithPriority(vorrang.Interactive))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := question.Result(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(answer.Text, "Paris") {
		t.Errorf("the capital of France: %q", answer.Text)
	}
	rest, err := report.Result(ctx)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "preemptions", rest.Finished.Usage.Preemptions, 1)
	equal(t, "report", text+rest.Text, undisturbed.Text)
}
