package vorrang

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// closeWait is how long Close waits for the server to acknowledge; then it cuts the stream.
const closeWait = time.Second

// errNoCredit says that nothing would ever be read, and so nothing granted.
var errNoCredit = errors.New("vorrang: credit must be at least 1, or WithManualCredit be given")

// Session is one bidirectional stream that carries many requests. It is safe for use by many goroutines.
//
// It has two goroutines, one that sends and one that receives, and neither waits for whoever reads a [Stream]. With
// [WithAutoResume] there is one more while it has no gRPC stream.
type Session struct {
	stub     vorrangv1.GenerationServiceClient
	settings sessionSettings
	values   context.Context // the caller's, without its end
	life     context.Context // ends when the session is closed
	end      context.CancelFunc
	helpers  sync.WaitGroup // goroutines that resume
	closing  sync.Once

	resuming  chan struct{} // holds one token while somebody resumes
	switching sync.RWMutex  // held to read while a start is under way, to write while the link is replaced

	mu        sync.Mutex
	link      *link
	info      SessionInfo
	streams   map[string]*Stream
	closed    bool
	goingAway chan struct{}
	endsAt    time.Time
	forget    func() bool
}

// Session opens a session and waits for the server's answer. The end of ctx closes it; see [Session.Close].
func (c *Client) Session(ctx context.Context, options ...SessionOption) (*Session, error) {
	settings := newSessionSettings(options)
	if settings.open.DefaultCreditTokens != nil && settings.open.GetDefaultCreditTokens() == 0 {
		return nil, errNoCredit
	}
	s := &Session{
		stub:      c.stub,
		values:    context.WithoutCancel(ctx),
		settings:  settings,
		resuming:  make(chan struct{}, 1),
		streams:   map[string]*Stream{},
		goingAway: make(chan struct{}),
	}
	s.life, s.end = context.WithCancel(s.values)
	link, info, err := s.open(ctx, settings.open.GetResumeSessionToken())
	if err != nil {
		s.end()
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link, s.info = link, info
	s.forget = context.AfterFunc(ctx, func() { _ = s.Close() })
	return s, nil
}

// Info is what the server said when the session was opened or last resumed.
func (s *Session) Info() SessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// Disconnected is closed when the gRPC stream in use now has ended.
func (s *Session) Disconnected() <-chan struct{} { return s.current().done }

// GoingAway is closed when the server has announced its end; no request can be started any more.
func (s *Session) GoingAway() <-chan struct{} { return s.goingAway }

// EndsAt is when the server cuts what still runs; zero unless it is going away.
func (s *Session) EndsAt() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.endsAt
}

// Start starts a request and returns its events.
//
// It returns at once: whether the server takes the request shows in the events. The end of ctx cancels the request on
// the server, and its deadline bounds the request there. Whoever stops reading before the end should call
// [Stream.Cancel]; a request whose events nobody reads is stopped by its credit and fails after a while.
func (s *Session) Start(ctx context.Context, request Request, options ...RequestOption) (*Stream, error) {
	settings, err := request.settings(options)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	settings.boundBy(ctx)
	if settings.id == "" {
		settings.id = rand.Text()
	}
	start := &vorrangv1.StartCommand{RequestId: settings.id, Spec: settings.spec}
	stream, err := s.begin(ctx, settings, start, 0)
	for s.settings.patience > 0 && errors.Is(err, ErrDisconnected) && !errors.Is(err, ReasonSessionState) {
		if resumed := s.resumeWithin(ctx); resumed != nil && !errors.Is(resumed, ReasonResumeOutOfRange) {
			return nil, err
		}
		stream, err = s.begin(ctx, settings, start, 0)
	}
	return stream, err
}

// Attach takes up a request that was started elsewhere, in a session opened with [WithSessionToken].
//
// Its events after the given sequence are sent again; [Stream.LastSequence] says how far a reader got. Credit has to
// be given as it was when the request was started.
func (s *Session) Attach(
	ctx context.Context, requestID string, afterSequence uint64, options ...RequestOption,
) (*Stream, error) {
	settings, err := Request{}.settings(options)
	if err != nil {
		return nil, err
	}
	settings.id = requestID
	return s.begin(ctx, settings, nil, afterSequence)
}

func (s *Session) begin(
	ctx context.Context, settings *requestSettings, start *vorrangv1.StartCommand, afterSequence uint64,
) (*Stream, error) {
	if !settings.manualCredit && settings.spec.CreditTokens != nil && settings.spec.GetCreditTokens() == 0 {
		return nil, errNoCredit
	}
	s.switching.RLock()
	defer s.switching.RUnlock()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, ErrSessionClosed
	}
	if s.streams[settings.id] != nil {
		s.mu.Unlock()
		return nil, &Error{
			Code: codes.AlreadyExists, Reason: ReasonDuplicateRequestID,
			Message: fmt.Sprintf("request %q is alive in this session", settings.id),
		}
	}
	stream := newStream(s, s.link, settings, start, afterSequence, s.info.DefaultCredit)
	s.streams[settings.id] = stream
	s.mu.Unlock()
	if err := stream.link.send(ctx, stream.opening(afterSequence)); err != nil {
		s.remove(stream)
		return nil, err
	}
	select {
	case <-stream.link.done: // it may have ended before this stream was known
		stream.disconnect(stream.link, s.settings.patience > 0)
	default:
	}
	stream.follow(ctx)
	return stream, nil
}

// Close cancels what is alive, ends the session and waits until its goroutines have ended. It takes about a second at
// most, and may be called more than once. Readers get what came before, then [ErrSessionClosed].
func (s *Session) Close() error {
	s.closing.Do(func() {
		s.mu.Lock()
		s.closed = true
		s.forget()
		link, streams := s.link, slices.Collect(maps.Values(s.streams))
		s.mu.Unlock()
		s.end()
		s.helpers.Wait()
		s.takeLeave(link, streams)
		link.stop()
		s.failAll(ErrSessionClosed)
	})
	return nil
}

// takeLeave tells the server that nobody will take the requests up again; it would wait for that otherwise.
func (s *Session) takeLeave(link *link, streams []*Stream) {
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	for _, stream := range streams {
		if link.send(ctx, cancelFrame(stream.id)) != nil {
			return
		}
	}
	if link.send(ctx, nil) != nil {
		return
	}
	select {
	case <-link.done:
	case <-ctx.Done():
	}
}

// open makes a link and waits for the server's answer; ctx bounds that alone.
func (s *Session) open(ctx context.Context, token string) (*link, SessionInfo, error) {
	link, err := startLink(ctx, s.values, s.stub, s.receive, s.lost)
	if err != nil {
		return nil, SessionInfo{}, cmp.Or(ctx.Err(), err)
	}
	command := proto.CloneOf(s.settings.open)
	command.ResumeSessionToken = token
	// When it fails the link has ended, and says why below.
	_ = link.send(ctx, &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Open{Open: command}})
	answer := opening{}
	select {
	case answer = <-link.opened:
	case <-link.done:
		select {
		case answer = <-link.opened: // it came just before the end
		default:
			answer.err = errorFromLoss(link.err)
		}
	}
	if !link.unbind() {
		answer.err = ctx.Err()
	}
	if answer.err != nil {
		link.stop()
		return nil, SessionInfo{}, answer.err
	}
	return link, decodeOpened(answer.event), nil
}

// What the receiving goroutine does.

func (s *Session) receive(link *link, frame *vorrangv1.SessionResponse) {
	switch event := frame.GetEvent().(type) {
	case *vorrangv1.SessionResponse_Opened:
		link.answerOpen(opening{event: event.Opened})
	case *vorrangv1.SessionResponse_GoAway:
		s.onGoAway(event.GoAway)
	case *vorrangv1.SessionResponse_CommandRejected:
		s.onRejected(link, frame.GetRequestId(), event.CommandRejected)
	default:
		if stream := s.find(frame.GetRequestId()); stream != nil && stream.receive(frame) {
			s.remove(stream)
		}
	}
}

func (s *Session) onGoAway(event *vorrangv1.GoAwayEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.endsAt.IsZero() {
		close(s.goingAway)
	}
	s.endsAt = time.Now().Add(event.GetTimeLeft().AsDuration())
}

func (s *Session) onRejected(link *link, requestID string, event *vorrangv1.CommandRejectedEvent) {
	err := errorFromStatus(event.GetStatus())
	command := event.GetCommand()
	if command == "open" {
		link.answerOpen(opening{err: err})
		return
	}
	stream := s.find(requestID)
	switch {
	case stream != nil && (command == "start" || command == "resume"):
		if stream.reject(command, err) {
			s.remove(stream)
		}
	case stream != nil && command == "reprioritize":
		stream.rejectChange(err)
	case s.settings.onRejected != nil:
		s.settings.onRejected(requestID, command, err)
	}
}

func (s *Session) find(requestID string) *Stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams[requestID]
}

func (s *Session) remove(stream *Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[stream.id] == stream {
		delete(s.streams, stream.id)
	}
}

func (s *Session) current() *link {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link
}

func (s *Session) failAll(err error) {
	s.mu.Lock()
	streams := s.streams
	s.streams = map[string]*Stream{}
	s.mu.Unlock()
	for _, stream := range streams {
		stream.fail(err)
	}
}
