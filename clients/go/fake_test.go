package vorrang_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// fake answers a session's frames one by one, and calls with a status: for what a real server can't be made to send.
type fake struct {
	vorrangv1.UnimplementedGenerationServiceServer
	answer func(*vorrangv1.SessionRequest) []*vorrangv1.SessionResponse
	breaks func(*vorrangv1.SessionRequest) bool // whether the stream breaks once a frame was answered; nil = never
	status *statuspb.Status
	tokens []string
}

func (f *fake) Session(call grpc.BidiStreamingServer[vorrangv1.SessionRequest, vorrangv1.SessionResponse]) error {
	for {
		request, err := call.Recv()
		if err != nil {
			return nil // half-closed or gone
		}
		answers := []*vorrangv1.SessionResponse{{Event: &vorrangv1.SessionResponse_Opened{
			Opened: &vorrangv1.OpenedEvent{SessionToken: "token", DefaultCreditTokens: 100}}}}
		if request.GetOpen() == nil {
			answers = f.answer(request)
		}
		for _, answer := range answers {
			if err := call.Send(answer); err != nil {
				return err
			}
		}
		if f.breaks != nil && f.breaks(request) {
			return status.Error(codes.Unavailable, "broken")
		}
	}
}

func (f *fake) Generate(ctx context.Context, _ *vorrangv1.GenerateRequest) (*vorrangv1.GenerateResponse, error) {
	incoming, _ := metadata.FromIncomingContext(ctx)
	f.tokens = incoming.Get("authorization")
	return nil, status.FromProto(f.status).Err()
}

func (f *fake) GenerateStream(
	_ *vorrangv1.GenerateStreamRequest, _ grpc.ServerStreamingServer[vorrangv1.GenerateStreamResponse],
) error {
	return status.FromProto(f.status).Err()
}

// listen serves on a port of its own, for connections that are cut.
func (f *fake) listen(t *testing.T) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	vorrangv1.RegisterGenerationServiceServer(server, f)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

func (f *fake) serve(t *testing.T, options ...vorrang.DialOption) *vorrang.Client {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.Creds(insecure.NewCredentials()))
	vorrangv1.RegisterGenerationServiceServer(server, f)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	dialer := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return listener.DialContext(ctx)
	})
	return dial(t, "passthrough:///fake", append([]vorrang.DialOption{
		vorrang.WithPlaintext(), vorrang.WithGRPC(dialer)}, options...)...)
}

// events numbers frames of a request.
func events(requestID string, frames ...*vorrangv1.SessionResponse) []*vorrangv1.SessionResponse {
	for number, frame := range frames {
		frame.RequestId, frame.Sequence = requestID, uint64(number+1)
	}
	return frames
}

func acceptedFrame(event *vorrangv1.AcceptedEvent) *vorrangv1.SessionResponse {
	return &vorrangv1.SessionResponse{Event: &vorrangv1.SessionResponse_Accepted{Accepted: event}}
}

func finishedFrame() *vorrangv1.SessionResponse {
	finished := &vorrangv1.FinishedEvent{Reason: vorrangv1.FinishReason_FINISH_REASON_STOP}
	return &vorrangv1.SessionResponse{Event: &vorrangv1.SessionResponse_Finished{Finished: finished}}
}

func rejectedFrame(command string, wire *statuspb.Status) *vorrangv1.SessionResponse {
	rejected := &vorrangv1.CommandRejectedEvent{Command: command, Status: wire}
	return &vorrangv1.SessionResponse{Event: &vorrangv1.SessionResponse_CommandRejected{CommandRejected: rejected}}
}

func wireStatus(t *testing.T, code codes.Code, reason string, details ...proto.Message) *statuspb.Status {
	t.Helper()
	wire := &statuspb.Status{Code: int32(code), Message: "it says why"}
	for _, detail := range append(
		[]proto.Message{&errdetails.ErrorInfo{Reason: reason, Domain: "vorrang"}}, details...) {
		packed, err := anypb.New(detail)
		if err != nil {
			t.Fatal(err)
		}
		wire.Details = append(wire.Details, packed)
	}
	return wire
}

// reasons are those of the protocol.
func reasons() map[string]bool {
	names := map[string]bool{}
	for number, name := range vorrangv1.ErrorReason_name {
		if number != 0 {
			names[strings.TrimPrefix(name, "ERROR_REASON_")] = true
		}
	}
	return names
}

func TestEveryReasonOfTheProtocolIsATypedErrorWhereverItComes(t *testing.T) {
	known := map[string]bool{}
	for _, reason := range vorrang.Reasons() {
		known[string(reason)] = true
	}
	for name := range reasons() {
		if !known[name] {
			t.Errorf("%s has no constant here", name)
		}
		delete(known, name)
		wire := wireStatus(t, codes.ResourceExhausted, name,
			&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
			&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
				{Field: "sampling.top_p", Description: "must be at most 1"}}})
		server := &fake{status: wire}
		server.answer = func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
			id := request.GetStart().GetRequestId()
			if id == "rejected" {
				answer := rejectedFrame("start", wire)
				answer.RequestId = id
				return []*vorrangv1.SessionResponse{answer}
			}
			failed := &vorrangv1.FailedEvent{Status: wire, Retryable: true, Usage: &vorrangv1.Usage{OutputTokens: 3}}
			return events(id, acceptedFrame(&vorrangv1.AcceptedEvent{}),
				&vorrangv1.SessionResponse{Event: &vorrangv1.SessionResponse_Failed{Failed: failed}})
		}
		client := server.serve(t)
		session := open(t, client)
		_, unary := client.Generate(within(t), greedy("hello"))
		call, err := client.GenerateStream(within(t), greedy("hello"))
		if err != nil {
			t.Fatal(err)
		}
		_, streamed := call.Result()
		_, failed := start(t, session, "hello").Result(within(t))
		_, rejected := start(t, session, "hello", vorrang.WithRequestID("rejected")).Result(within(t))
		for way, err := range map[string]error{
			"unary": unary, "streamed": streamed, "failed": failed, "rejected": rejected,
		} {
			typed := failure(t, err)
			equal(t, way+" reason", typed.Reason, vorrang.Reason(name))
			equal(t, way+" is", errors.Is(err, vorrang.Reason(name)), true)
			equal(t, way+" is another", errors.Is(err, vorrang.Reason("ANOTHER")), false)
			equal(t, way+" code", status.Code(err), codes.ResourceExhausted)
			equal(t, way+" retry", typed.RetryAfter, 1500*time.Millisecond)
			equal(t, way+" field", typed.Violations[0].Field, "sampling.top_p")
			if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "it says why") {
				t.Errorf("%s says %q", way, err)
			}
		}
		equal(t, "usage", failure(t, failed).Usage.OutputTokens, 3)
		equal(t, "retryable", failure(t, failed).Retryable, true)
	}
	if len(known) > 0 {
		t.Errorf("the protocol does not have %v", known)
	}
}

func TestReasonsForAnEndAndAPreemptionFollowTheProtocol(t *testing.T) {
	finish := map[vorrang.FinishReason]bool{
		vorrang.FinishStop: true, vorrang.FinishStopString: true, vorrang.FinishStopToken: true,
		vorrang.FinishLength: true, vorrang.FinishCapacity: true, vorrang.FinishTimeLimit: true,
		vorrang.FinishCancelled: true,
	}
	for number, name := range vorrangv1.FinishReason_name {
		if number != 0 && !finish[vorrang.FinishReason(strings.TrimPrefix(name, "FINISH_REASON_"))] {
			t.Errorf("%s has no constant here", name)
		}
	}
	equal(t, "finish reasons", len(finish), len(vorrangv1.FinishReason_name)-1)
	preempt := map[vorrang.PreemptReason]bool{
		vorrang.PreemptSeats: true, vorrang.PreemptBlocks: true, vorrang.PreemptGrowth: true,
		vorrang.PreemptOperator: true, vorrang.PreemptRunner: true,
	}
	for number, name := range vorrangv1.PreemptReason_name {
		if number != 0 && !preempt[vorrang.PreemptReason(strings.TrimPrefix(name, "PREEMPT_REASON_"))] {
			t.Errorf("%s has no constant here", name)
		}
	}
	equal(t, "preempt reasons", len(preempt), len(vorrangv1.PreemptReason_name)-1)
}

func TestACapIsSeen(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		id := request.GetStart().GetRequestId()
		return events(id, acceptedFrame(&vorrangv1.AcceptedEvent{Level: 5, Capped: true, RequestedLevel: -10}), finishedFrame())
	}}
	first := accepted(t, start(t, open(t, server.serve(t)), "hello"))
	equal(t, "accepted", first, vorrang.Accepted{Level: 5, Capped: true, RequestedLevel: -10})
}

func TestWhatANewerServerSendsIsPassedOver(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		id := request.GetStart().GetRequestId()
		return events(id, acceptedFrame(&vorrangv1.AcceptedEvent{}), &vorrangv1.SessionResponse{}, finishedFrame())
	}}
	equal(t, "reason", result(t, start(t, open(t, server.serve(t)), "hello")).Finished.Reason, vorrang.FinishStop)
}

func TestEventsThatComeTwiceArePassedOverAndAGapIsAnError(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		id := request.GetStart().GetRequestId()
		frames := events(id, acceptedFrame(&vorrangv1.AcceptedEvent{}), acceptedFrame(&vorrangv1.AcceptedEvent{}),
			finishedFrame())
		if id == "twice" {
			frames[1].Sequence, frames[2].Sequence = 1, 2
		} else {
			frames[2].Sequence = 4
		}
		return frames
	}}
	session := open(t, server.serve(t))
	twice := start(t, session, "hello", vorrang.WithRequestID("twice"))
	accepted(t, twice)
	event, err := twice.Recv(within(t))
	if _, ok := event.(vorrang.Finished); !ok {
		t.Errorf("%#v, %v", event, err)
	}
	_, err = start(t, session, "hello", vorrang.WithRequestID("gap")).Result(within(t))
	equal(t, "code", failure(t, err).Code, codes.DataLoss)
}

func TestRejectionsThatNobodyWaitsForReachTheHandler(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		if pause := request.GetPause(); pause != nil {
			answer := rejectedFrame("pause", wireStatus(t, codes.NotFound, "UNKNOWN_REQUEST"))
			answer.RequestId = pause.GetRequestId()
			return []*vorrangv1.SessionResponse{answer}
		}
		return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
	}}
	told := make(chan string, 1)
	session := open(t, server.serve(t), vorrang.WithRejectionHandler(func(id, command string, err *vorrang.Error) {
		told <- id + " " + command + " " + string(err.Reason)
	}))
	stream := start(t, session, "hello", vorrang.WithRequestID("a"))
	if err := stream.Pause(within(t)); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-told:
		equal(t, "told", got, "a pause UNKNOWN_REQUEST")
	case <-time.After(patience):
		t.Fatal("nobody was told")
	}
	accepted(t, stream)
}

func TestAChangeOfPriorityThatTheEndOvertakesIsAnswered(t *testing.T) {
	server := &fake{answer: func(request *vorrangv1.SessionRequest) []*vorrangv1.SessionResponse {
		if change := request.GetReprioritize(); change != nil {
			end := finishedFrame()
			end.RequestId, end.Sequence = change.GetRequestId(), 2
			return []*vorrangv1.SessionResponse{end}
		}
		return events(request.GetStart().GetRequestId(), acceptedFrame(&vorrangv1.AcceptedEvent{}))
	}}
	stream := start(t, open(t, server.serve(t)), "hello")
	if _, err := stream.Reprioritize(within(t), vorrang.Batch); !errors.Is(err, vorrang.ReasonUnknownRequest) {
		t.Errorf("%v", err)
	}
}

func TestATokenIsSentAndNeverInPlaintextToAnotherHost(t *testing.T) {
	served := &fake{status: wireStatus(t, codes.PermissionDenied, "PERMISSION_DENIED")}
	client := dial(t, served.listen(t), vorrang.WithToken("secret"))
	if _, err := client.Generate(within(t), greedy("hello")); !errors.Is(err, vorrang.ReasonPermissionDenied) {
		t.Errorf("%v", err)
	}
	if len(served.tokens) != 1 || served.tokens[0] != "Bearer secret" {
		t.Errorf("sent was %q", served.tokens)
	}
	if _, err := vorrang.Dial(within(t), "192.0.2.1:1", vorrang.WithPlaintext(), vorrang.WithToken("secret")); err == nil ||
		!strings.Contains(err.Error(), "transport level security") {
		t.Errorf("a token in plaintext: %v", err)
	}
}
