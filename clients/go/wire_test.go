package vorrang_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// startOf is what arrives at a server when a request is started.
func startOf(
	t *testing.T, ctx context.Context, request vorrang.Request, options ...vorrang.RequestOption,
) *vorrangv1.StartCommand {
	t.Helper()
	arrived := make(chan *vorrangv1.StartCommand, 1)
	server := &fake{answer: func(frame *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		if frame.GetStart() != nil {
			arrived <- frame.GetStart()
		}
		return nil
	}}
	session := open(t, server.serve(t))
	if _, err := session.Start(ctx, request, options...); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-arrived:
		return got
	case <-time.After(patience):
		t.Fatal("nothing arrived")
		return nil
	}
}

func TestARequestArrivesAsItWasAsked(t *testing.T) {
	got := startOf(t, context.Background(),
		vorrang.Request{
			Messages: []vorrang.Message{{Role: "system", Content: "be brief"}, {Role: "user", Content: "hello"}},
			Sampling: &vorrangv1.SamplingParams{TopK: proto.Uint32(40)},
			Label:    "a label", Model: "a model",
		},
		vorrang.WithRequestID("an id"), vorrang.WithPriority(vorrang.Batch), vorrang.WithCredit(7),
		vorrang.WithQueueTimeout(time.Second), vorrang.WithTotalTimeout(time.Minute),
		vorrang.WithMaxTokens(9), vorrang.WithTemperature(0.5), vorrang.WithAdapter("an adapter"),
		vorrang.WithSpec(func(spec *vorrangv1.GenerationSpec) { spec.NumOutputs = proto.Uint32(2) }))
	want := &vorrangv1.StartCommand{RequestId: "an id", Spec: &vorrangv1.GenerationSpec{
		Prompt: &vorrangv1.Prompt{Value: &vorrangv1.Prompt_Chat{Chat: &vorrangv1.ChatPrompt{
			Messages: []*vorrangv1.ChatMessage{{Role: "system", Content: "be brief"}, {Role: "user", Content: "hello"}}}}},
		Sampling: &vorrangv1.SamplingParams{
			TopK: proto.Uint32(40), MaxTokens: proto.Uint32(9), Temperature: proto.Float32(0.5)},
		Priority:     &vorrangv1.Priority{Value: &vorrangv1.Priority_ClassName{ClassName: "batch"}},
		QueueTimeout: durationpb.New(time.Second), TotalTimeout: durationpb.New(time.Minute),
		CreditTokens: proto.Uint32(7), Label: "a label", Model: "a model", Adapter: "an adapter",
		NumOutputs: proto.Uint32(2),
	}}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestADeadlineIsToldToTheServer(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	bound := startOf(t, ctx, greedy("hello")).GetSpec().GetTotalTimeout().AsDuration()
	if bound <= 59*time.Minute || bound > time.Hour {
		t.Errorf("the context has an hour, the request %v", bound)
	}
	own := startOf(t, ctx, greedy("hello"), vorrang.WithTotalTimeout(time.Minute))
	equal(t, "a shorter one of its own", own.GetSpec().GetTotalTimeout().AsDuration(), time.Minute)
	longer := startOf(t, ctx, greedy("hello"), vorrang.WithTotalTimeout(2*time.Hour))
	if bound := longer.GetSpec().GetTotalTimeout().AsDuration(); bound > time.Hour {
		t.Errorf("the context has an hour, the request %v", bound)
	}
}

func TestTheEndOfItsContextClosesASession(t *testing.T) {
	client := dial(t, serve(t).Address)
	ctx, cancel := context.WithCancel(context.Background())
	session, err := client.Session(ctx)
	if err != nil {
		t.Fatal(err)
	}
	stream := start(t, session, "hello", vorrang.WithManualCredit(2))
	readTokens(t, stream, 2)
	cancel()
	equal(t, "reason", result(t, stream).Finished.Reason, vorrang.FinishCancelled)
	select {
	case <-session.Disconnected():
	case <-time.After(patience):
		t.Fatal("it is still open")
	}
	if _, err := session.Start(context.Background(), greedy("hello")); !errors.Is(err, vorrang.ErrSessionClosed) {
		t.Errorf("a start: %v", err)
	}
	if _, err := client.Session(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a session in a context that has ended: %v", err)
	}
}

// TestPingsAreNotTooManyForTheServer takes longer than a server needs to lose patience with pings.
func TestPingsAreNotTooManyForTheServer(t *testing.T) {
	if os.Getenv("VORRANG_GO_SLOW") != "1" {
		t.Skip("VORRANG_GO_SLOW=1 runs this, for 45 seconds")
	}
	session := open(t, dial(t, serve(t).Address, vorrang.WithKeepalive(10*time.Second, 10*time.Second)))
	stream := start(t, session, "hello", vorrang.WithManualCredit(1), vorrang.WithMaxTokens(4))
	text := readTokens(t, stream, 1)
	if err := stream.Pause(within(t)); err != nil { // who is paused is not too slow
		t.Fatal(err)
	}
	select {
	case <-session.Disconnected():
		t.Fatal("the server has closed the connection")
	case <-time.After(45 * time.Second):
	}
	if err := errors.Join(stream.Credit(within(t), 9), stream.Unpause(within(t))); err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+result(t, stream).Text, scripted("hello", 4))
}
