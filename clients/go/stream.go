package vorrang

import (
	"context"
	"iter"
	"sync"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// Stream is the events of one request of a session. One goroutine at a time may read it; its commands are safe for
// use by many.
//
// Events wait in it until they are read. How many can wait is bounded by the request's credit, so a stream that nobody
// reads costs its siblings nothing.
type Stream struct {
	id      string
	session *Session
	start   *vorrangv1.StartCommand // nil when it was attached
	manual  bool
	turn    chan struct{} // holds one token while a change of priority is being sent
	signal  chan struct{} // holds one token when there may be something to read

	mu       sync.Mutex
	link     *link
	lost     error // set while the session has no gRPC stream
	patient  bool  // whether a reader waits for the next one
	final    error // set when nothing more can come: io.EOF or what it failed with
	waiting  []waitingEvent
	received uint64 // sequence of the newest event
	read     uint64 // sequence of the last event that Recv returned
	credit   credit
	changes  changes
	// cancelled is whether a new link has to be told that nobody wants it any more.
	cancelled bool
	// paused is whether it is to stand still, and pauseLink the link that was told last; a new one has to be told too.
	paused    bool
	pauseLink *link
	pauseSaid bool // whether anybody has said so or otherwise
	release   func() bool
}

type waitingEvent struct {
	event    Event
	sequence uint64
}

func newStream(
	session *Session,
	link *link,
	settings *requestSettings,
	start *vorrangv1.StartCommand,
	afterSequence uint64,
	defaultCredit uint32,
) *Stream {
	window := defaultCredit
	if settings.spec.CreditTokens != nil {
		window = settings.spec.GetCreditTokens()
	}
	return &Stream{
		id:       settings.id,
		session:  session,
		start:    start,
		manual:   settings.manualCredit,
		turn:     make(chan struct{}, 1),
		signal:   make(chan struct{}, 1),
		link:     link,
		received: afterSequence,
		read:     afterSequence,
		credit:   newCredit(window),
	}
}

// ID is the request's id, unique in its tenant.
func (s *Stream) ID() string { return s.id }

// LastSequence is the sequence of the last event that [Stream.Recv] returned; what [Session.Attach] goes on from.
func (s *Stream) LastSequence() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.read
}

// Recv waits for the next event. After [Finished] it returns io.EOF.
//
// An [*Error] says that the request was refused or failed. One that is [ErrDisconnected] says that the session has
// lost its gRPC stream; Recv goes on where it was once [Session.Resume] has taken it up. The end of ctx ends the
// waiting alone.
func (s *Stream) Recv(ctx context.Context) (Event, error) {
	for {
		event, grant, err := s.take()
		if event != nil || err != nil {
			s.offer(grant)
			return event, err
		}
		if err := s.wait(ctx, grant); err != nil {
			return nil, err
		}
	}
}

// grant is credit to be sent on a link; its frame is nil when none is due.
type grant struct {
	link   *link
	frame  *vorrangv1.SessionRequest
	tokens uint32
}

// take takes the oldest event that waits, and the credit that is due.
func (s *Stream) take() (Event, grant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var event Event
	if len(s.waiting) > 0 {
		event, s.read = s.waiting[0].event, s.waiting[0].sequence
		s.waiting[0] = waitingEvent{}
		s.waiting = s.waiting[1:]
		if delta, ok := event.(Delta); ok {
			s.credit.consume(len(delta.TokenIDs))
		}
	} else if s.final != nil {
		return nil, grant{}, s.final
	} else if s.lost != nil && !s.patient {
		return nil, grant{}, s.lost
	}
	due := grant{link: s.link}
	if !s.manual && s.final == nil && s.lost == nil {
		if due.tokens = s.credit.takeDue(); due.tokens > 0 {
			due.frame = creditFrame(s.id, due.tokens, s.read)
		}
	}
	return event, due, nil
}

// offer sends credit if that can be done at once; else it is due again.
func (s *Stream) offer(due grant) {
	if due.frame == nil {
		return
	}
	select {
	case due.link.frames <- due.frame:
	default:
		s.giveBack(due)
	}
}

// wait waits for something to read, sending credit meanwhile.
func (s *Stream) wait(ctx context.Context, due grant) error {
	for {
		frames := due.link.frames
		if due.frame == nil {
			frames = nil
		}
		select {
		case frames <- due.frame:
			due.frame = nil
		case <-s.signal:
			s.giveBack(due)
			return nil
		case <-ctx.Done():
			s.giveBack(due)
			return ctx.Err()
		}
	}
}

func (s *Stream) giveBack(due grant) {
	if due.frame == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == due.link { // a new link has been given all that was due
		s.credit.giveBack(due.tokens)
	}
}

// Events are all events to the end; an error is the last thing it yields. Leaving the loop early leaves the request
// alive.
func (s *Stream) Events(ctx context.Context) iter.Seq2[Event, error] {
	return sequence(func() (Event, error) { return s.Recv(ctx) })
}

// Result reads to the end.
func (s *Stream) Result(ctx context.Context) (*Result, error) { return collect(s.Events(ctx)) }

// follow cancels the request on the server when ctx ends.
func (s *Stream) follow(ctx context.Context) {
	release := context.AfterFunc(ctx, func() { _ = s.Cancel(context.Background()) }) // ends with the link at the latest
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release = release
	if s.final != nil {
		release()
	}
}

// wake tells the reader that there may be something to read.
func (s *Stream) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
