// Package testserver starts the real server, as a process of its own, for the tests of this module. By default it has
// the scripted model, whose output is hand-computable.
package testserver

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startWait is how long a server may take to be ready; a real model is loaded in it.
const startWait = 2 * time.Minute

var readyLine = regexp.MustCompile(`^ready on (\S+:\d+): `)

// Server is one that has said it is ready.
type Server struct {
	// Address is "host:port".
	Address string

	process *exec.Cmd
	ended   chan struct{}
}

// Start starts a server, and kills it when the test has ended. Settings are "KEY=value" for its environment, or "KEY" for
// what is to be the server's own default.
// The test is skipped where there is no Python with the server in it.
func Start(t testing.TB, settings ...string) *Server {
	t.Helper()
	server, err := Launch(settings...)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Kill)
	return server
}

// Launch starts a server for whoever kills it. The error is [os.ErrNotExist] where there is no Python for it.
func Launch(settings ...string) (*Server, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	interpreter, err := python(root)
	if err != nil {
		return nil, err
	}
	process := exec.Command(interpreter, "-m", "server.cli", "serve")
	process.Dir = root
	process.Stderr = os.Stderr
	process.Env = environment(root, settings)
	output, err := process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := process.Start(); err != nil {
		return nil, err
	}
	timer := time.AfterFunc(startWait, func() { _ = process.Process.Kill() })
	line, _ := bufio.NewReader(output).ReadString('\n')
	timer.Stop()
	server := &Server{process: process, ended: make(chan struct{})}
	go func() {
		_ = process.Wait()
		close(server.ended)
	}()
	match := readyLine.FindStringSubmatch(line)
	if match == nil {
		server.Kill()
		return nil, fmt.Errorf("the server did not become ready: %q", line)
	}
	server.Address = match[1]
	return server, nil
}

// Certificates is a folder with those that tests/support/certificates.py makes: ca.pem, server.pem, acme.pem of a
// client, stranger.pem and stranger-ca.pem of nobody's, and their keys.
// The test is skipped where there is no Python to make them.
func Certificates(t testing.TB) string {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Skip(err)
	}
	interpreter, err := python(root)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	process := exec.Command(interpreter, "-m", "tests.support.certificates", folder)
	process.Dir = root
	process.Env = environment(root, nil)
	if output, err := process.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return folder
}

// Kill ends the server at once.
func (s *Server) Kill() {
	_ = s.process.Process.Kill()
	<-s.ended
}

// Terminate asks the server to drain and end.
func (s *Server) Terminate() { _ = s.process.Process.Signal(syscall.SIGTERM) }

// Shared makes a function that returns one server for many tests, started by the first, and one that ends it.
func Shared() (get func(testing.TB) *Server, end func()) {
	var started *Server
	launch := sync.OnceValue(func() (err error) {
		started, err = Launch()
		return err
	})
	get = func(t testing.TB) *Server {
		t.Helper()
		err := launch()
		if errors.Is(err, os.ErrNotExist) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		return started
	}
	end = func() {
		if started != nil {
			started.Kill()
		}
	}
	return get, end
}

// Scripted is what the scripted model says after a prompt; see engine/runner/scripted.py.
func Scripted(prompt string, numTokens int) string {
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

// repository is the folder that has the server.
func repository() (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(folder, "pyproject.toml")); err == nil {
			return folder, nil
		}
		if filepath.Dir(folder) == folder {
			return "", fmt.Errorf("this module is not in Vorrang's repository: %w", os.ErrNotExist)
		}
		folder = filepath.Dir(folder)
	}
}

// python is the interpreter that has the server's dependencies; a relative VORRANG_PYTHON counts from clients/go. Only
// where none is named its absence is [os.ErrNotExist].
func python(root string) (string, error) {
	path, named := os.Getenv("VORRANG_PYTHON"), true
	if path == "" {
		path, named = "../../.venv/bin/python", false
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(root, "clients/go", path)
	}
	if _, err := os.Stat(path); err != nil {
		if named {
			return "", fmt.Errorf("VORRANG_PYTHON is no program: %s", path)
		}
		return "", fmt.Errorf("there is no server to test with; `make setup` or VORRANG_PYTHON gives one: %w", err)
	}
	return path, nil
}

func environment(root string, settings []string) []string {
	var kept []string
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "VORRANG_") {
			kept = append(kept, variable)
		}
	}
	kept = append(kept,
		"PYTHONPATH="+root+string(os.PathListSeparator)+filepath.Join(root, "protos"),
		"VORRANG_SERVER__LISTEN=127.0.0.1:0",
		"VORRANG_MODEL__PATH=scripted",
		"VORRANG_ENGINE__RUNNER=inline",
		"VORRANG_LOG__LEVEL=warning",
	)
	for _, setting := range settings {
		name, _, given := strings.Cut(setting, "=")
		kept = slices.DeleteFunc(kept, func(variable string) bool { return strings.HasPrefix(variable, name+"=") })
		if given {
			kept = append(kept, setting)
		}
	}
	return kept
}
