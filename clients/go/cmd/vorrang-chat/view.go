package main

import (
	"fmt"
	"io"
	"strings"
	"sync"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

const (
	saveCursor  = "\x1b7"
	eraseToEnd  = "\x1b8\x1b[J" // back to where the cursor was saved
	reverse     = "\x1b[7m"
	plainLetter = "\x1b[0m"
)

// view shows answers and the state they are in: on a terminal as a mark behind the text that vanishes when the text
// goes on, else as a line of its own among the diagnostics.
type view struct {
	mu                  sync.Mutex
	output, diagnostics io.Writer
	terminal            bool
	level               int
	marked              bool
}

func newView(output, diagnostics io.Writer, terminal bool) *view {
	return &view{output: output, diagnostics: diagnostics, terminal: terminal}
}

// show shows an event.
func (v *view) show(event vorrang.Event) {
	switch event := event.(type) {
	case vorrang.Accepted:
		v.level = event.Level
		note := ""
		if event.Capped {
			note = fmt.Sprintf(", capped from %d", event.RequestedLevel)
		}
		if event.PriorityIgnored {
			note += ", which the server's policy ignores"
		}
		v.state("queued at level %d%s, %d before it", event.Level, note, event.QueuePosition)
	case vorrang.QueueUpdate:
		v.state("queued at level %d, %d before it", v.level, event.QueuePosition)
	case vorrang.Started:
		v.state("running at level %d", v.level)
	case vorrang.Preempted:
		v.state("preempted (%s), %d so far", event.Reason, event.Count)
	case vorrang.Resumed:
		v.state("running at level %d again", v.level)
	case vorrang.PriorityChanged:
		v.level = event.Level
		v.state("level %d from now on", event.Level)
	case vorrang.Delta:
		v.mu.Lock()
		defer v.mu.Unlock()
		v.unmark()
		_, _ = io.WriteString(v.output, event.Text)
	case vorrang.Finished:
		usage := event.Usage
		v.state("%s at level %d: %d tokens, %.2f s queued, preempted %d times",
			strings.ToLower(string(event.Reason)), v.level, usage.OutputTokens, usage.Queued.Seconds(), usage.Preemptions)
	}
}

// state shows in which state the answer is.
func (v *view) state(format string, values ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	text := fmt.Sprintf(format, values...)
	if !v.terminal {
		_, _ = fmt.Fprintf(v.diagnostics, "[%s]\n", text)
		return
	}
	v.unmark()
	_, _ = fmt.Fprint(v.output, saveCursor, reverse, " ", text, " ", plainLetter)
	v.marked = true
}

func (v *view) unmark() {
	if v.marked {
		_, _ = io.WriteString(v.output, eraseToEnd)
		v.marked = false
	}
}

// end leaves an answer behind.
func (v *view) end(answer string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.marked = false // the last state stays
	if answer != "" || v.terminal {
		_, _ = io.WriteString(v.output, "\n")
	}
	if err != nil {
		_, _ = fmt.Fprintln(v.diagnostics, err)
	}
}

// say tells something on a terminal.
func (v *view) say(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.terminal {
		v.unmark()
		_, _ = fmt.Fprintln(v.diagnostics, text)
	}
}

// prompt asks for a line on a terminal.
func (v *view) prompt(priority vorrang.Priority) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.terminal {
		_, _ = fmt.Fprintf(v.output, "[%s] > ", priority)
	}
}
