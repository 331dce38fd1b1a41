package vorrang

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

const errorDomain = "vorrang"

var (
	// ErrDisconnected is what [errors.Is] finds in errors of a session that has lost its stream.
	// [Session.Resume] takes it up again.
	ErrDisconnected = errors.New("vorrang: the session has lost its stream")
	// ErrSessionClosed says that the session was closed on this side.
	ErrSessionClosed = errors.New("vorrang: the session is closed")
)

// Reason is the machine-readable cause of an error, as errors.proto names it without its prefix.
// It is an error itself, so that errors.Is(err, vorrang.ReasonQueueFull) holds for an [Error] of that reason.
type Reason string

// Error is the name of the reason.
func (r Reason) Error() string { return string(r) }

// The reasons of this revision of the protocol; errors.proto says what each stands for.
const (
	ReasonInvalidRequest      Reason = "INVALID_REQUEST"
	ReasonEmptyPrompt         Reason = "EMPTY_PROMPT"
	ReasonContextExceeded     Reason = "CONTEXT_EXCEEDED"
	ReasonPoolExceeded        Reason = "POOL_EXCEEDED"
	ReasonInvalidMetadata     Reason = "INVALID_METADATA"
	ReasonMalformedFrame      Reason = "MALFORMED_FRAME"
	ReasonUnknownModel        Reason = "UNKNOWN_MODEL"
	ReasonUnknownRequest      Reason = "UNKNOWN_REQUEST"
	ReasonDuplicateRequestID  Reason = "DUPLICATE_REQUEST_ID"
	ReasonSessionState        Reason = "SESSION_STATE"
	ReasonQueueFull           Reason = "QUEUE_FULL"
	ReasonTenantQuotaExceeded Reason = "TENANT_QUOTA_EXCEEDED"
	ReasonSLOUnattainable     Reason = "SLO_UNATTAINABLE"
	ReasonSessionLimit        Reason = "SESSION_LIMIT"
	ReasonCallLimit           Reason = "CALL_LIMIT"
	ReasonSlowConsumer        Reason = "SLOW_CONSUMER"
	ReasonDraining            Reason = "DRAINING"
	ReasonEngineRestarting    Reason = "ENGINE_RESTARTING"
	ReasonDisplaced           Reason = "DISPLACED"
	ReasonPreemptionLimit     Reason = "PREEMPTION_LIMIT"
	ReasonDeadlineExceeded    Reason = "DEADLINE_EXCEEDED"
	ReasonCancelled           Reason = "CANCELLED"
	ReasonUnauthenticated     Reason = "UNAUTHENTICATED"
	ReasonPermissionDenied    Reason = "PERMISSION_DENIED"
	ReasonResumeOutOfRange    Reason = "RESUME_OUT_OF_RANGE"
	ReasonUnimplemented       Reason = "UNIMPLEMENTED"
	ReasonInternal            Reason = "INTERNAL"
)

// retryable says of every reason whether the same request may succeed later, where the server does not say.
var retryable = map[Reason]bool{
	ReasonInvalidRequest:      false,
	ReasonEmptyPrompt:         false,
	ReasonContextExceeded:     false,
	ReasonPoolExceeded:        false,
	ReasonInvalidMetadata:     false,
	ReasonMalformedFrame:      false,
	ReasonUnknownModel:        false,
	ReasonUnknownRequest:      false,
	ReasonDuplicateRequestID:  false,
	ReasonSessionState:        false,
	ReasonQueueFull:           true,
	ReasonTenantQuotaExceeded: true,
	ReasonSLOUnattainable:     true,
	ReasonSessionLimit:        true,
	ReasonCallLimit:           true,
	ReasonSlowConsumer:        false,
	ReasonDraining:            true,
	ReasonEngineRestarting:    true,
	ReasonDisplaced:           true,
	ReasonPreemptionLimit:     true,
	ReasonDeadlineExceeded:    false,
	ReasonCancelled:           false,
	ReasonUnauthenticated:     false,
	ReasonPermissionDenied:    false,
	ReasonResumeOutOfRange:    false,
	ReasonUnimplemented:       false,
	ReasonInternal:            false,
}

// Reasons are all that this revision of the protocol has, in the order of their names.
func Reasons() []Reason { return slices.Sorted(maps.Keys(retryable)) }

// FieldViolation is one field of a request that broke a rule.
type FieldViolation struct {
	// Field is its path, such as "sampling.temperature".
	Field string
	// Description is the rule, and what was given.
	Description string
}

// Error is everything the server, or the way to it, answers instead of an output.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Reason is the cause; empty when the server gave none, for instance because it can't be reached.
	Reason Reason
	// Message is for people.
	Message string
	// Retryable says that the same request may succeed later.
	Retryable bool
	// RetryAfter is how long the server asks to wait before that; 0 when it did not say.
	RetryAfter time.Duration
	// Violations are the fields that broke a rule.
	Violations []FieldViolation
	// Usage is what the request has cost so far; nil when that is not known.
	Usage *Usage

	disconnected bool
}

// Error is the message and the reason, or the code where there is none.
func (e *Error) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("vorrang: %s (%s)", e.Message, e.Reason)
	}
	return fmt.Sprintf("vorrang: %s (%s)", e.Message, e.Code)
}

// Is compares with a [Reason], with [ErrDisconnected], and with the two errors of a context.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrDisconnected:
		return e.disconnected
	case context.Canceled:
		return e.Code == codes.Canceled
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	}
	reason, ok := target.(Reason)
	return ok && reason != "" && reason == e.Reason
}

// passes says that what stands in the way may do so for a while only: the server says so, or it was not the server.
func (e *Error) passes() bool {
	switch e.Code {
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled:
		return e.Retryable || e.Reason == ""
	}
	return e.Retryable
}

// GRPCStatus makes the status package understand this error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// errorFromCall reads what a call ended with; nil stays nil.
func errorFromCall(err error) error {
	if err == nil {
		return nil
	}
	return errorFromStatus(status.Convert(err).Proto())
}

// errorFromStatus reads code, message and details; details that can't be read don't hide the error.
func errorFromStatus(wire *statuspb.Status) *Error {
	read := status.FromProto(wire)
	result := &Error{Code: read.Code(), Message: read.Message()}
	for _, detail := range read.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				result.Reason = Reason(detail.GetReason())
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				result.Violations = append(
					result.Violations, FieldViolation{violation.GetField(), violation.GetDescription()})
			}
		case *errdetails.RetryInfo:
			result.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	if result.Reason != "" {
		result.Retryable = retryable[result.Reason]
	} else {
		result.Retryable = result.Code == codes.Unavailable
	}
	return result
}

func errorFromFailed(failed *vorrangv1.FailedEvent) *Error {
	result := errorFromStatus(failed.GetStatus())
	result.Retryable = failed.GetRetryable()
	usage := decodeUsage(failed.GetUsage())
	result.Usage = &usage
	return result
}

// errorFromLoss is what a session's streams get when its gRPC stream has ended with err; io.EOF is a regular end.
func errorFromLoss(err error) *Error {
	result := &Error{Code: codes.Unavailable, Message: "the server ended the session", Retryable: true}
	if grpcError := new(Error); errors.As(err, &grpcError) {
		copied := *grpcError
		copied.Message = "the session has lost its stream: " + copied.Message
		result = &copied
	}
	result.disconnected = true
	return result
}
