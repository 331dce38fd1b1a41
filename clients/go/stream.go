package vorrang

import (
	"context"
	"fmt"
	"io"
	"iter"
	"sync"

	"google.golang.org/grpc/codes"

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
	changes  []chan acknowledgement // changes of priority under way, oldest first
	// cancelled is whether a new link has to be told that nobody wants it any more.
	cancelled bool
	release   func() bool
}

type waitingEvent struct {
	event    Event
	sequence uint64
}

// acknowledgement is the answer to a change of priority.
type acknowledgement struct {
	event PriorityChanged
	err   error
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

// What the session does.

// opening is the frame that makes the server send the events after a sequence.
func (s *Stream) opening(afterSequence uint64) *vorrangv1.SessionRequest {
	// Whether the server has heard of a request that it has not answered is not known here; the same start again
	// means the same request.
	if s.start != nil && afterSequence == 0 {
		return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Start{Start: s.start}}
	}
	resume := &vorrangv1.ResumeCommand{RequestId: s.id, AfterSequence: afterSequence}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Resume{Resume: resume}}
}

// receive takes an event from the wire; true when it was the last.
func (s *Stream) receive(frame *vorrangv1.SessionResponse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sequence := frame.GetSequence()
	if s.final != nil || sequence <= s.received {
		return false
	}
	if sequence != s.received+1 {
		s.end(&Error{
			Code:    codes.DataLoss,
			Message: fmt.Sprintf("events %d to %d of request %q are missing", s.received+1, sequence-1, s.id),
		})
		return true
	}
	s.received = sequence
	if failed := frame.GetFailed(); failed != nil {
		s.end(errorFromFailed(failed))
		return true
	}
	event := decode(frame)
	switch event := event.(type) {
	case nil: // one that a newer server sends
		return false
	case PriorityChanged:
		s.answer(acknowledgement{event: event})
	case Delta:
		s.credit.receive(len(event.TokenIDs))
	}
	s.put(waitingEvent{event, sequence})
	if _, ok := event.(Finished); ok {
		s.end(io.EOF)
		return true
	}
	return false
}

// put lets an event wait, joined with the one before it where that says the same in less.
func (s *Stream) put(next waitingEvent) {
	if len(s.waiting) > 0 {
		last := &s.waiting[len(s.waiting)-1]
		if event, ok := joined(last.event, next.event); ok {
			*last = waitingEvent{event, next.sequence}
			return
		}
	}
	s.waiting = append(s.waiting, next)
	s.wake()
}

func joined(last, next Event) (Event, bool) {
	switch next := next.(type) {
	case QueueUpdate:
		_, ok := last.(QueueUpdate)
		return next, ok
	case Delta:
		last, ok := last.(Delta)
		if !ok || last.OutputIndex != next.OutputIndex {
			return nil, false
		}
		last.Text += next.Text
		last.TokenIDs = append(last.TokenIDs, next.TokenIDs...)
		last.Logprobs = append(last.Logprobs, next.Logprobs...)
		return last, true
	}
	return nil, false
}

// end makes sure that nothing more can come. The lock is held.
func (s *Stream) end(err error) {
	if s.final != nil {
		return
	}
	s.final = err
	for len(s.changes) > 0 {
		s.answer(acknowledgement{err: endedError(s.id)})
	}
	if s.release != nil {
		s.release()
	}
	s.wake()
}

func (s *Stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(err)
}

// failBegun ends it if the server has answered it; true when that is so.
func (s *Stream) failBegun(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start != nil && s.received == 0 {
		return false
	}
	s.end(err)
	return true
}

// reject ends it because its start or its resumption was not obeyed; true when that is so.
func (s *Stream) reject(command string, err *Error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if command == "start" && s.received > 0 {
		return false // that was another start of the same id
	}
	s.end(err)
	return true
}

// acknowledge answers the oldest change of priority.
func (s *Stream) acknowledge(answer acknowledgement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer(answer)
}

func (s *Stream) answer(answer acknowledgement) {
	if len(s.changes) > 0 {
		s.changes[0] <- answer // has room for it
		s.changes = s.changes[1:]
	}
}

// disconnect says that a link has ended, and whether readers wait for the next one; harmless when the stream is on
// another.
func (s *Stream) disconnect(link *link, patient bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link != link || s.lost != nil || s.final != nil {
		return
	}
	s.patient = patient
	s.lost = errorFromLoss(link.err)
	for len(s.changes) > 0 {
		s.answer(acknowledgement{err: s.lost})
	}
	s.wake()
}

// giveUp lets readers wait no more for a gRPC stream, if there is none.
func (s *Stream) giveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.patient = false
	s.wake()
}

// moveTo puts the stream on a new link; it counts as lost until rebind.
func (s *Stream) moveTo(link *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link = link
}

// rebind takes the request up on its new link.
func (s *Stream) rebind(ctx context.Context, link *link) error {
	s.mu.Lock()
	if s.final != nil {
		s.mu.Unlock()
		return nil
	}
	frames := []*vorrangv1.SessionRequest{s.opening(s.received)}
	if missing := s.credit.renew(s.manual); missing > 0 {
		frames = append(frames, creditFrame(s.id, missing, s.read))
	}
	s.mu.Unlock()
	for _, frame := range frames {
		if err := link.send(ctx, frame); err != nil {
			return err
		}
	}
	// Only now may readers grant credit: what came before the resumption would be forgotten by it.
	s.mu.Lock()
	s.lost = nil
	cancelled := s.cancelled
	s.mu.Unlock()
	select {
	case <-link.done:
		s.disconnect(link, s.session.settings.patience > 0)
	default:
	}
	if cancelled {
		return link.send(ctx, cancelFrame(s.id))
	}
	return nil
}

// wake tells the reader that there may be something to read.
func (s *Stream) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}
