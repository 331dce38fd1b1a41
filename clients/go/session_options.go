package vorrang

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

const (
	protocolRevision = 1
	defaultName      = "vorrang-go"
)

// SessionOption says how a session is to be opened.
type SessionOption func(*sessionSettings)

type sessionSettings struct {
	open       *vorrangv1.OpenCommand
	onRejected func(requestID, command string, err *Error)
	patience   time.Duration
}

// WithClientName names the program in the server's logs; at most 128 bytes.
func WithClientName(name string) SessionOption {
	return func(s *sessionSettings) { s.open.ClientName = name }
}

// WithDefaultPriority is the priority of requests that have none of their own.
func WithDefaultPriority(priority Priority) SessionOption {
	return func(s *sessionSettings) { s.open.DefaultPriority = priority.wire() }
}

// WithDefaultCredit is the credit of requests that have none of their own, at least 1; see [WithCredit].
func WithDefaultCredit(tokens uint32) SessionOption {
	return func(s *sessionSettings) { s.open.DefaultCreditTokens = proto.Uint32(tokens) }
}

// WithSessionToken takes up a session that another process, or another [Client], has lost. Its requests are
// cancelled after the server's grace unless [Session.Attach] takes them up one by one.
func WithSessionToken(token string) SessionOption {
	return func(s *sessionSettings) { s.open.ResumeSessionToken = token }
}

// WithAutoResume lets the session resume by itself after a loss, as [Session.Resume] does. Readers, starts and changes
// of priority wait meanwhile; only when the server can't be reached for so long they get an error that is
// [ErrDisconnected]. Other commands never wait: a pause or a cancel is told later, and credit by hand gets that error.
func WithAutoResume(patience time.Duration) SessionOption {
	return func(s *sessionSettings) { s.patience = patience }
}

// WithRejectionHandler is told of commands that the server did not obey and whose caller no longer waits: pauses and
// credit for requests it does not know. It is called between frames and must not block.
func WithRejectionHandler(handler func(requestID, command string, err *Error)) SessionOption {
	return func(s *sessionSettings) { s.onRejected = handler }
}

// SessionInfo is what the server said when the session was opened.
type SessionInfo struct {
	// Token names the session when it must be resumed; empty = the server does not offer that.
	Token string
	// Limits of the server.
	Limits *vorrangv1.Limits
	// DefaultLevel of requests that carry no priority of their own.
	DefaultLevel int
	// DefaultCredit of requests that have none of their own, in tokens; 0 = the server does not enforce credit.
	DefaultCredit uint32
	// Policy in force: "priority", "fcfs", ...
	Policy string
	// ServerVersion of the server program.
	ServerVersion string
}

func newSessionSettings(options []SessionOption) sessionSettings {
	settings := sessionSettings{open: &vorrangv1.OpenCommand{ClientName: defaultName, Revision: protocolRevision}}
	for _, option := range options {
		option(&settings)
	}
	return settings
}

func decodeOpened(opened *vorrangv1.OpenedEvent) SessionInfo {
	return SessionInfo{
		Token:         opened.GetSessionToken(),
		Limits:        opened.GetLimits(),
		DefaultLevel:  int(opened.GetDefaultLevel()),
		DefaultCredit: opened.GetDefaultCreditTokens(),
		Policy:        opened.GetPolicy(),
		ServerVersion: opened.GetServerVersion(),
	}
}
