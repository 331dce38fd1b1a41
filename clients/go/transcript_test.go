package vorrang_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

const transcriptFolder = "../transcript/"

// transcript is what clients/transcript/README.md describes.
type transcript struct {
	Settings map[string]string
	Acts     []act
}

type act struct {
	Do, ID, Priority, Event string
	MaxTokens               uint32  `json:"max_tokens"`
	CreditTokens            *uint32 `json:"credit_tokens"`
	Read                    *bool
}

// record is what is written down of a request.
type record struct {
	Events []string `json:"events"`
	Text   string   `json:"text"`
}

func TestTheTranscriptIsTheOneOfTheOtherLanguages(t *testing.T) {
	t.Parallel() // it waits more than it computes
	script, err := os.ReadFile(transcriptFolder + "transcript.json")
	if err != nil {
		t.Fatal(err)
	}
	var played transcript
	if err := json.Unmarshal(script, &played); err != nil {
		t.Fatal(err)
	}
	address := os.Getenv("VORRANG_TRANSCRIPT_SERVER") // one that other languages perform on as well
	if address == "" {
		var settings []string
		for name, value := range played.Settings {
			settings = append(settings, name+"="+value)
		}
		address = serve(t, settings...).Address
	}
	got := newStage(t, address).perform(played.Acts)
	if path := os.Getenv("VORRANG_TRANSCRIPT_OUT"); path != "" {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(transcriptFolder + "golden.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, golden) {
		t.Errorf("this is not golden.json:\n%s", got)
	}
}

// stage is a session whose connection can be cut, and the requests on it.
type stage struct {
	t       *testing.T
	proxy   *proxy
	session *vorrang.Session
	prefix  string
	roles   map[string]*role
}

func newStage(t *testing.T, address string) *stage {
	p := newProxy(t, address)
	session := open(t, dial(t, p.address), vorrang.WithAutoResume(patience))
	return &stage{t, p, session, rand.Text() + "-", map[string]*role{}}
}

// perform does all acts and returns what is to be written down.
func (s *stage) perform(acts []act) []byte {
	s.t.Helper()
	token := s.session.Info().Token
	for _, act := range acts {
		s.do(act)
	}
	records := map[string]record{}
	for name, role := range s.roles {
		role.await("its end", func() bool { return role.ended })
		records[name] = record{role.events, role.text}
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(map[string]any{
		"requests": records, "resumed": s.session.Info().Token == token,
	}); err != nil {
		s.t.Fatal(err)
	}
	return out.Bytes()
}

func (s *stage) do(act act) {
	s.t.Helper()
	role := s.roles[act.ID]
	switch act.Do {
	case "start":
		options := []vorrang.RequestOption{
			vorrang.WithRequestID(s.prefix + act.ID), vorrang.WithMaxTokens(act.MaxTokens),
			vorrang.WithPriority(vorrang.ParsePriority(act.Priority)),
		}
		if act.CreditTokens != nil {
			options = append(options, vorrang.WithCredit(*act.CreditTokens))
		}
		role = newRole(s.t, start(s.t, s.session, act.ID, options...))
		s.roles[act.ID] = role
		if act.Read == nil || *act.Read {
			role.read()
		}
	case "wait":
		role.await(act.Event, func() bool { return role.kinds[act.Event] })
	case "progress":
		role.awaitProgress()
	case "cancel":
		if err := role.stream.Cancel(within(s.t)); err != nil {
			s.t.Fatal(err)
		}
	case "reprioritize":
		if _, err := role.stream.Reprioritize(within(s.t), vorrang.ParsePriority(act.Priority)); err != nil {
			s.t.Fatal(err)
		}
	case "cut":
		lose(s.t, s.proxy, s.session)
	default:
		s.t.Fatalf("nobody knows how to do %q", act.Do)
	}
}

// role is a request and what was seen of it.
type role struct {
	t      *testing.T
	stream *vorrang.Stream
	read   func()

	mu        sync.Mutex
	news      chan struct{} // closed and made anew by every event
	events    []string
	kinds     map[string]bool
	text      string
	numTokens int
	ended     bool
}

func newRole(t *testing.T, stream *vorrang.Stream) *role {
	r := &role{t: t, stream: stream, news: make(chan struct{}), kinds: map[string]bool{}}
	ctx := within(t)
	r.read = sync.OnceFunc(func() { go r.readAll(ctx) })
	return r
}

func (r *role) readAll(ctx context.Context) {
	for event, err := range r.stream.Events(ctx) {
		if err != nil {
			if !errors.Is(err, context.Canceled) { // the test has failed already
				r.t.Errorf("%s: %v", r.stream.ID(), err)
			}
			return
		}
		r.write(event)
	}
}

// write writes an event down; several deltas in a row count as one.
func (r *role) write(event vorrang.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kind, detail := "", ""
	switch event := event.(type) {
	case vorrang.QueueUpdate:
		return
	case vorrang.Accepted:
		kind, detail = "accepted", fmt.Sprintf(" %d", event.Level)
	case vorrang.Started:
		kind = "started"
	case vorrang.Delta:
		kind = "delta"
		equal(r.t, r.stream.ID()+": first token", event.FirstTokenIndex, r.numTokens)
		r.text += event.Text
		r.numTokens += len(event.TokenIDs)
	case vorrang.Preempted:
		kind, detail = "preempted", fmt.Sprintf(" %s %d", event.Reason, event.Count)
	case vorrang.Resumed:
		kind = "resumed"
	case vorrang.PriorityChanged:
		kind, detail = "priority_changed", fmt.Sprintf(" %d", event.Level)
	case vorrang.Finished:
		kind, detail = "finished", fmt.Sprintf(" %s %d", event.Reason, event.Usage.OutputTokens)
		r.ended = true
	}
	if kind != "delta" || r.events[len(r.events)-1] != kind {
		r.events = append(r.events, kind+detail)
	}
	r.kinds[kind] = true
	close(r.news)
	r.news = make(chan struct{})
}

// await reads until something holds.
func (r *role) await(what string, holds func() bool) {
	r.t.Helper()
	r.read()
	deadline := time.After(patience)
	for {
		r.mu.Lock()
		done, news := holds(), r.news
		r.mu.Unlock()
		if done {
			return
		}
		select {
		case <-news:
		case <-deadline:
			r.t.Fatalf("%s: waited in vain for %s after %v", r.stream.ID(), what, r.events)
		}
	}
}

func (r *role) awaitProgress() {
	r.t.Helper()
	r.mu.Lock()
	before := len(r.text)
	r.mu.Unlock()
	r.await("more text", func() bool { return len(r.text) > before })
}
