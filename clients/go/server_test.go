package vorrang_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// patience bounds every wait of a test; nothing is timed by it.
const patience = 30 * time.Second

var (
	readyLine    = regexp.MustCompile(`^ready on (\S+:\d+): `)
	sharedServer = sync.OnceValues(func() (*server, error) { return launch() })
)

// server is a real one, as a process of its own.
type server struct {
	address string
	process *exec.Cmd
	ended   chan struct{}
}

func TestMain(m *testing.M) {
	code := m.Run()
	if started, err := sharedServer(); err == nil {
		started.kill()
	}
	os.Exit(code)
}

// python is the interpreter that has the server, or why there is none.
func python() (string, error) {
	path := os.Getenv("VORRANG_PYTHON")
	if path == "" {
		path = "../../.venv/bin/python"
	}
	path, err := filepath.Abs(path)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return "", fmt.Errorf("no server to test with, `make setup` or VORRANG_PYTHON gives one: %w", err)
	}
	return path, nil
}

// launch starts a server with the scripted model; settings are "KEY=value" for the environment.
func launch(settings ...string) (*server, error) {
	interpreter, err := python()
	if err != nil {
		return nil, err
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	process := exec.Command(interpreter, "-m", "server.cli", "serve")
	process.Dir = root
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "VORRANG_") {
			process.Env = append(process.Env, variable)
		}
	}
	process.Env = append(process.Env,
		"PYTHONPATH="+root+":"+filepath.Join(root, "protos"),
		"VORRANG_SERVER__LISTEN=127.0.0.1:0", "VORRANG_MODEL__PATH=scripted", "VORRANG_ENGINE__RUNNER=inline",
		"VORRANG_LOG__LEVEL=warning",
	)
	process.Env = append(process.Env, settings...)
	process.Stderr = os.Stderr
	output, err := process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := process.Start(); err != nil {
		return nil, err
	}
	line, _ := bufio.NewReader(output).ReadString('\n')
	started := &server{process: process, ended: make(chan struct{})}
	go func() {
		_ = process.Wait()
		close(started.ended)
	}()
	match := readyLine.FindStringSubmatch(line)
	if match == nil {
		started.kill()
		return nil, fmt.Errorf("the server did not become ready: %q", line)
	}
	started.address = match[1]
	return started, nil
}

func (s *server) kill() {
	_ = s.process.Process.Kill()
	<-s.ended
}

func (s *server) terminate() { _ = s.process.Process.Signal(syscall.SIGTERM) }

// serve is a server with settings of its own, or the shared one when there are none.
func serve(t *testing.T, settings ...string) *server {
	t.Helper()
	if _, err := python(); err != nil {
		t.Skip(err)
	}
	if len(settings) == 0 {
		started, err := sharedServer()
		if err != nil {
			t.Fatal(err)
		}
		return started
	}
	started, err := launch(settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(started.kill)
	return started
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

// scripted is what the scripted model says; see engine/runner/scripted.py.
func scripted(prompt string, numTokens int) string {
	ids := []byte(prompt)
	for range numTokens {
		sum := 7 * len(ids)
		for position, id := range ids {
			sum += (position + 1) * int(id)
		}
		ids = append(ids, byte(32+sum%95))
	}
	return string(ids[len(prompt):])
}

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
	refuse  bool
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{address: listener.Addr().String()}
	t.Cleanup(func() {
		_ = listener.Close()
		p.cut()
	})
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.join(client, target)
		}
	}()
	return p
}

func (p *proxy) join(client net.Conn, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	upstream, err := net.Dial("tcp", target)
	if err != nil || p.refuse {
		_ = client.Close()
		return
	}
	p.open = append(p.open, client, upstream)
	go func() { _, _ = bufio.NewReader(client).WriteTo(upstream) }()
	go func() { _, _ = bufio.NewReader(upstream).WriteTo(client) }()
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
