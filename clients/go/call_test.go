package vorrang_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

func TestGenerateAnswersAtOnce(t *testing.T) {
	client := dial(t, serve(t).Address)
	whole, err := client.Generate(within(t), greedy("hello"),
		vorrang.WithMaxTokens(9), vorrang.WithPriority(vorrang.Level(-3)))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", whole.Text, scripted("hello", 9))
	equal(t, "tokens", len(whole.TokenIDs), 9)
	equal(t, "level", whole.Accepted.Level, -3)
	equal(t, "reason", whole.Finished.Reason, vorrang.FinishLength)
}

func TestGenerateStreamHasTheSameEvents(t *testing.T) {
	client := dial(t, serve(t).Address)
	call, err := client.GenerateStream(within(t), vorrang.Request{
		Messages: []vorrang.Message{{Role: "user", Content: "hello"}}, Sampling: temperature(0)}, vorrang.WithMaxTokens(9))
	if err != nil {
		t.Fatal(err)
	}
	defer call.Close()
	whole, err := call.Result()
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", whole.Text, scripted("user: hello\nassistant: ", 9))
	equal(t, "prompt", whole.Accepted.PromptTokens, len("user: hello\nassistant: "))
}

func TestTheEndOfACallIsTypedAndReachesTheServer(t *testing.T) {
	client := dial(t, serve(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.01", "VORRANG_SCHEDULER__MAX_RUNNING_REQUESTS=1").Address)
	urgent := []vorrang.RequestOption{vorrang.WithPriority(vorrang.Level(-100)), vorrang.WithMaxTokens(2000)}
	brief, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := client.Generate(brief, greedy("hello"), urgent...)
	equal(t, "deadline", errors.Is(err, context.DeadlineExceeded), true)
	equal(t, "code", failure(t, err).Code, codes.DeadlineExceeded)

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	call, err := client.GenerateStream(ctx, greedy("hello"), urgent...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := call.Recv(); err != nil {
		t.Fatal(err)
	}
	stop()
	_, err = call.Result()
	equal(t, "cancelled", errors.Is(err, context.Canceled), true)

	// Both held the only seat at the most urgent level for 20 s; only their end lets another have it before.
	soon, cancelSoon := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancelSoon()
	if _, err := client.Generate(soon, greedy("hello"), vorrang.WithMaxTokens(2)); err != nil {
		t.Errorf("the seat is still taken: %v", err)
	}
}

func TestErrorsOfTheServerAreTyped(t *testing.T) {
	client := dial(t, serve(t, "VORRANG_SERVER__MAX_SESSION_REQUESTS=2").Address)
	_, err := client.Generate(within(t), vorrang.Request{Prompt: "hello", Sampling: temperature(-1)})
	invalid := failure(t, err)
	equal(t, "reason", invalid.Reason, vorrang.ReasonInvalidRequest)
	equal(t, "code", invalid.Code, codes.InvalidArgument)
	equal(t, "field", invalid.Violations[0].Field, "sampling.temperature")
	equal(t, "retryable", invalid.Retryable, false)

	for _, given := range []struct {
		request vorrang.Request
		option  vorrang.RequestOption
		reason  vorrang.Reason
	}{
		{vorrang.Request{}, vorrang.WithMaxTokens(1), vorrang.ReasonEmptyPrompt},
		{vorrang.Request{Prompt: "hello", Model: "another"}, vorrang.WithMaxTokens(1), vorrang.ReasonUnknownModel},
		{vorrang.Request{TokenIDs: make([]uint32, 5000)}, vorrang.WithMaxTokens(1), vorrang.ReasonContextExceeded},
		{vorrang.Request{Prompt: "hello"}, vorrang.WithCredit(1), vorrang.ReasonInvalidRequest},
		{vorrang.Request{Prompt: "hello"}, vorrang.WithSpec(func(spec *vorrangv1.GenerationSpec) {
			spec.Adapter = "another"
		}), vorrang.ReasonUnknownModel},
	} {
		if _, err := client.Generate(within(t), given.request, given.option); !errors.Is(err, given.reason) {
			t.Errorf("want %s: %v", given.reason, err)
		}
	}
	if _, err := client.Generate(within(t), vorrang.Request{Prompt: "a", TokenIDs: []uint32{1}}); err == nil {
		t.Error("two prompts were taken")
	}

	session := open(t, client)
	for range 2 {
		accepted(t, start(t, session, "hello", vorrang.WithManualCredit(0)))
	}
	_, err = start(t, session, "hello").Result(within(t))
	equal(t, "limit", failure(t, err).Reason, vorrang.ReasonSessionLimit)
	_, err = start(t, open(t, client), "hello", vorrang.WithRequestID("ümlaut")).Result(within(t))
	equal(t, "id", failure(t, err).Violations[0].Field, "request_id")
	_, err = client.Session(within(t), vorrang.WithSessionToken("made up"))
	if !errors.Is(err, vorrang.ReasonResumeOutOfRange) {
		t.Errorf("a token that was made up: %v", err)
	}
}

func TestAServerThatIsNotThereIsATypedError(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	_ = listener.Close()
	_, err = vorrang.Dial(within(t), address)
	absent := failure(t, err)
	equal(t, "code", absent.Code, codes.Unavailable)
	equal(t, "retryable", absent.Retryable, true)
	if _, err := vorrang.Dial(within(t), address, vorrang.WithKeepalive(time.Second, time.Second)); err == nil {
		t.Error("pings that the server forbids were taken")
	}
}

func TestTheModelSaysWhatIsServed(t *testing.T) {
	model, err := dial(t, serve(t).Address).Model(within(t))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "name", model.GetName(), "scripted")
}

func TestTLSIsSpokenToWhoAsksForIt(t *testing.T) {
	certificate := selfSigned(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&certificate)))
	vorrangv1.RegisterGenerationServiceServer(server, &fake{status: wireStatus(t, codes.NotFound, "UNKNOWN_MODEL")})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	trusted := x509.NewCertPool()
	trusted.AddCert(certificate.Leaf)
	address := listener.Addr().String()
	client := dial(t, address, vorrang.WithTLS(&tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS13}))
	if _, err := client.Generate(within(t), greedy("hello")); !errors.Is(err, vorrang.ReasonUnknownModel) {
		t.Errorf("%v", err)
	}
	if _, err := vorrang.Dial(within(t), address, vorrang.WithTLS(&tls.Config{MinVersion: tls.VersionTLS13})); err == nil {
		t.Error("a certificate that nobody vouches for was taken")
	}
	if _, err := vorrang.Dial(within(t), address); err == nil {
		t.Error("plaintext was taken for TLS")
	}
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key, Leaf: leaf}
}
