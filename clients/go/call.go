package vorrang

import (
	"context"
	"errors"
	"io"
	"iter"
	"strings"

	"google.golang.org/grpc"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// CallStream is the events of one call of [Client.GenerateStream]. It is for one goroutine.
type CallStream struct {
	call   grpc.ServerStreamingClient[vorrangv1.GenerateStreamResponse]
	cancel context.CancelFunc
	end    error
}

// GenerateStream starts one request as a call of its own. The end of ctx cancels the request on the server; so does
// [CallStream.Close], which must be called unless the events were read to their end.
func (c *Client) GenerateStream(
	ctx context.Context, request Request, options ...RequestOption,
) (*CallStream, error) {
	settings, err := request.settings(options)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.stub.GenerateStream(
		ctx, &vorrangv1.GenerateStreamRequest{Spec: settings.spec, RequestId: settings.id})
	if err != nil {
		cancel()
		return nil, errorFromCall(err)
	}
	return &CallStream{call: call, cancel: cancel}, nil
}

// Recv waits for the next event. After [Finished] it returns io.EOF; a refusal or failure is an [*Error].
func (s *CallStream) Recv() (Event, error) {
	for s.end == nil {
		frame, err := s.call.Recv()
		if err != nil {
			s.cancel()
			if !errors.Is(err, io.EOF) {
				err = errorFromCall(err)
			}
			s.end = err
			break
		}
		if event := decode(frame); event != nil {
			return event, nil
		}
	}
	return nil, s.end
}

// Events are all events to the end; an error is the last thing it yields. Leaving the loop early leaves the call open.
func (s *CallStream) Events() iter.Seq2[Event, error] { return sequence(s.Recv) }

// Result reads to the end.
func (s *CallStream) Result() (*Result, error) { return collect(s.Events()) }

// Close ends the call, and with it the request if it is still alive.
func (s *CallStream) Close() { s.cancel() }

func sequence(receive func() (Event, error)) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			event, err := receive()
			if errors.Is(err, io.EOF) || !yield(event, err) || err != nil {
				return
			}
		}
	}
}

func collect(events iter.Seq2[Event, error]) (*Result, error) {
	var result Result
	var texts []*strings.Builder
	for event, err := range events {
		if err != nil {
			return nil, err
		}
		result.add(event)
		if delta, ok := event.(Delta); ok {
			for len(texts) <= delta.OutputIndex {
				texts = append(texts, &strings.Builder{})
			}
			texts[delta.OutputIndex].WriteString(delta.Text)
		}
	}
	for index, text := range texts {
		result.output(index).Text = text.String()
	}
	result.complete()
	return &result, nil
}
