package vorrang

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// maxWaitingFrames may wait for the transport; then senders wait.
const maxWaitingFrames = 64

// link is one gRPC stream of a session: a goroutine that sends frames and one that receives them. It knows no
// requests. When it ends, for whatever reason, done is closed and err says why; both goroutines then end.
type link struct {
	call   grpc.BidiStreamingClient[vorrangv1.SessionRequest, vorrangv1.SessionResponse]
	cancel context.CancelFunc
	frames chan *vorrangv1.SessionRequest
	opened chan opening
	done   chan struct{}
	err    error
	ended  sync.WaitGroup
	// unbind ends the bond between the link and the context it was opened with; false when that has ended before.
	unbind func() bool
}

// opening is the answer to the first frame.
type opening struct {
	event *vorrangv1.OpenedEvent
	err   error
}

// startLink opens a gRPC stream with the given values; the end of ctx ends it until unbind is called.
//
// receive gets every frame in turn and must not block; lost is called once, after done is closed.
func startLink(
	ctx, values context.Context,
	stub vorrangv1.GenerationServiceClient,
	receive func(*link, *vorrangv1.SessionResponse),
	lost func(*link),
) (*link, error) {
	life, cancel := context.WithCancel(values)
	unbind := context.AfterFunc(ctx, cancel)
	call, err := stub.Session(life)
	if err != nil {
		unbind()
		cancel()
		return nil, errorFromCall(err)
	}
	l := &link{
		call:   call,
		cancel: cancel,
		frames: make(chan *vorrangv1.SessionRequest, maxWaitingFrames),
		opened: make(chan opening, 1),
		done:   make(chan struct{}),
		unbind: unbind,
	}
	l.ended.Go(l.sendFrames)
	l.ended.Go(func() {
		for {
			frame, err := call.Recv()
			if err != nil {
				l.err = io.EOF
				if err != io.EOF {
					l.err = errorFromCall(err)
				}
				break
			}
			receive(l, frame)
		}
		close(l.done)
		cancel()
		lost(l)
	})
	return l, nil
}

// sendFrames is the one sender; a nil frame half-closes the stream.
func (l *link) sendFrames() {
	for {
		select {
		case <-l.done:
			return
		case frame := <-l.frames:
			if frame == nil {
				_ = l.call.CloseSend()
				return
			}
			if l.call.Send(frame) != nil {
				return // the receiver learns why
			}
		}
	}
}

// send queues a frame. It waits while the transport is slow.
func (l *link) send(ctx context.Context, frame *vorrangv1.SessionRequest) error {
	select {
	case <-l.done:
		return errorFromLoss(l.err)
	default:
	}
	select {
	case l.frames <- frame:
		return nil
	case <-l.done:
		return errorFromLoss(l.err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stop cuts the stream and waits for both goroutines.
func (l *link) stop() {
	l.cancel()
	l.ended.Wait()
}

// answerOpen passes on the answer to the first frame; later ones are dropped.
func (l *link) answerOpen(answer opening) {
	select {
	case l.opened <- answer:
	default:
	}
}
