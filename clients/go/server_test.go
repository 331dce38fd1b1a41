package vorrang_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/internal/testserver"
)

// patience bounds every wait of a test; nothing is timed by it.
const patience = time.Minute

var sharedServer, endSharedServer = testserver.Shared()

func TestMain(m *testing.M) {
	code := m.Run()
	endSharedServer()
	os.Exit(code)
}

// serve is a server with settings of its own, or the shared one when there are none.
func serve(t *testing.T, settings ...string) *testserver.Server {
	t.Helper()
	if len(settings) == 0 {
		return sharedServer(t)
	}
	return testserver.Start(t, settings...)
}

// within is a context that ends with the test's patience.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func dial(t *testing.T, address string, options ...vorrang.DialOption) *vorrang.Client {
	t.Helper()
	client, err := vorrang.Dial(within(t), address, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func open(t *testing.T, client *vorrang.Client, options ...vorrang.SessionOption) *vorrang.Session {
	t.Helper()
	session, err := client.Session(context.Background(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = session.Close() })
	return session
}

func start(t *testing.T, session *vorrang.Session, prompt string, options ...vorrang.RequestOption) *vorrang.Stream {
	t.Helper()
	stream, err := session.Start(context.Background(), greedy(prompt), options...)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// greedy is a request whose output is known.
func greedy(prompt string) vorrang.Request {
	return vorrang.Request{Prompt: prompt, Sampling: temperature(0)}
}

func scripted(prompt string, numTokens int) string { return testserver.Scripted(prompt, numTokens) }

// until reads events up to one that satisfies the condition, and returns the text on the way.
func until(t *testing.T, stream *vorrang.Stream, condition func(vorrang.Event, string) bool) string {
	t.Helper()
	ctx, text := within(t), ""
	for {
		event, err := stream.Recv(ctx)
		if err != nil {
			t.Fatalf("after %q: %v", text, err)
		}
		if delta, ok := event.(vorrang.Delta); ok {
			text += delta.Text
		}
		if condition(event, text) {
			return text
		}
	}
}

// readTokens reads until that many characters, which are tokens of the scripted model, came.
func readTokens(t *testing.T, stream *vorrang.Stream, numTokens int) string {
	t.Helper()
	return until(t, stream, func(_ vorrang.Event, text string) bool { return len(text) >= numTokens })
}

func accepted(t *testing.T, stream *vorrang.Stream) vorrang.Accepted {
	t.Helper()
	event, err := stream.Recv(within(t))
	if err != nil {
		t.Fatal(err)
	}
	first, ok := event.(vorrang.Accepted)
	if !ok {
		t.Fatalf("the first event is %#v", event)
	}
	return first
}

func result(t *testing.T, stream *vorrang.Stream) *vorrang.Result {
	t.Helper()
	whole, err := stream.Result(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return whole
}

// othersGoOn lets another request run to its end: what could have happened meanwhile has.
func othersGoOn(t *testing.T, session *vorrang.Session) {
	t.Helper()
	witness := "somebody else"
	if got := result(t, start(t, session, witness, vorrang.WithMaxTokens(20))).Text; got != scripted(witness, 20) {
		t.Fatalf("the witness says %q", got)
	}
}

// failure is the error as this package types it.
func failure(t *testing.T, err error) *vorrang.Error {
	t.Helper()
	var typed *vorrang.Error
	if !errors.As(err, &typed) {
		t.Fatalf("not an *Error: %v", err)
	}
	return typed
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// proxy stands between client and server, so that a test can cut their connections.
type proxy struct {
	address string
	mu      sync.Mutex
	open    []net.Conn
	shut    bool // whether new connections are closed at once
	copies  sync.WaitGroup
	close   func()
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{address: listener.Addr().String()}
	p.copies.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.join(client, target)
		}
	})
	p.close = sync.OnceFunc(func() {
		_ = listener.Close()
		p.cut()
		p.copies.Wait()
	})
	t.Cleanup(p.close)
	return p
}

func (p *proxy) join(client net.Conn, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shut {
		_ = client.Close()
		return
	}
	upstream, err := net.Dial("tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	p.open = append(p.open, client, upstream)
	p.copies.Go(func() { p.copy(upstream, client) })
	p.copies.Go(func() { p.copy(client, upstream) })
}

// copy passes bytes on; the end of one side is the end of both.
func (p *proxy) copy(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_, _ = to.Close(), from.Close()
}

// shutOut says whether new connections are closed at once.
func (p *proxy) shutOut(shut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = shut
}

// cut breaks every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, connection := range p.open {
		_ = connection.Close()
	}
	p.open = nil
}
