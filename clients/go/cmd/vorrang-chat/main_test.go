package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/internal/testserver"
)

func TestPipedLinesAreAnsweredInTurn(t *testing.T) {
	server := testserver.Start(t)
	var output, diagnostics bytes.Buffer
	status := run(
		[]string{"-address", server.Address, "-priority", "7", "-temperature", "0", "-max-tokens", "5", "-system", "be brief"},
		strings.NewReader("hello\n\n/priority batch\nagain\n/reset\nhello\n"), &output, &diagnostics)
	if status != 0 {
		t.Fatal(diagnostics.String())
	}
	const opening = "system: be brief\n"
	first := testserver.Scripted(opening+"user: hello\nassistant: ", 5)
	second := testserver.Scripted(opening+"user: hello\nassistant: "+first+"\nuser: again\nassistant: ", 5)
	if want := first + "\n" + second + "\n" + first + "\n"; output.String() != want {
		t.Errorf("got %q, want %q", output.String(), want)
	}
	for _, state := range []string{
		"[queued at level 7, 0 before it]\n[running at level 7]\n[length at level 7: 5 tokens, ",
		"[queued at level 10, 0 before it]", "preempted 0 times]\n",
	} {
		if !strings.Contains(diagnostics.String(), state) {
			t.Errorf("%q is missing in %q", state, diagnostics.String())
		}
	}
}

func TestARefusedAnswerIsToldAndTheNextIsAsked(t *testing.T) {
	server := testserver.Start(t)
	var output, diagnostics bytes.Buffer
	status := run([]string{"-address", server.Address, "-temperature", "0", "-max-tokens", "5"},
		strings.NewReader("/priority nonsense\nhello\n/priority 1\nhello\n"), &output, &diagnostics)
	if want := testserver.Scripted("user: hello\nassistant: ", 5) + "\n"; status != 0 || output.String() != want {
		t.Errorf("status %d, got %q, want %q", status, output.String(), want)
	}
	if !strings.Contains(diagnostics.String(), "(INVALID_REQUEST)") {
		t.Error(diagnostics.String())
	}
}

func TestWhatGoesWrongEndsItWithAStatus(t *testing.T) {
	var output, diagnostics bytes.Buffer
	if status := run([]string{"-address", "127.0.0.1:1"}, strings.NewReader("hello\n"), &output, &diagnostics); status != 1 {
		t.Errorf("nobody listens, and the status is %d", status)
	}
	if !strings.Contains(diagnostics.String(), "Unavailable") {
		t.Error(diagnostics.String())
	}
	if status := run([]string{"-nonsense"}, os.Stdin, &output, &diagnostics); status != 2 {
		t.Errorf("an unknown flag, and the status is %d", status)
	}
}

func TestTheStateStandsBehindTheTextAndVanishes(t *testing.T) {
	var output bytes.Buffer
	view := newView(&output, &output, true)
	view.show(vorrang.Accepted{Level: 5, Capped: true, RequestedLevel: -10, QueuePosition: 2, PriorityIgnored: true})
	view.show(vorrang.QueueUpdate{QueuePosition: 1})
	view.show(vorrang.Delta{Text: "one "})
	view.show(vorrang.Preempted{Reason: vorrang.PreemptSeats, Count: 1})
	view.show(vorrang.Delta{Text: "two"})
	mark := func(text string) string { return "\x1b7\x1b[7m " + text + " \x1b[0m" }
	const vanish = "\x1b8\x1b[J"
	want := mark("queued at level 5, capped from -10, which the server's policy ignores, 2 before it") +
		vanish + mark("queued at level 5, 1 before it") + vanish + "one " +
		mark("preempted (SEATS), 1 so far") + vanish + "two"
	if output.String() != want {
		t.Errorf("got %q, want %q", output.String(), want)
	}
}
