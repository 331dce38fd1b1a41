package vorrang

import (
	"strings"
	"time"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// Event is something that has happened to a request: one of [Accepted], [QueueUpdate], [Started], [Delta],
// [Preempted], [Resumed], [PriorityChanged], [PromptLogprobs], [OutputFinished] and, as the last one,
// [Finished]. A failure is an error instead.
type Event interface{ isEvent() }

// Accepted is the first event: the request is valid and queued.
type Accepted struct {
	// Level in force; lower is more urgent.
	Level int
	// Capped is true when the tenant's cap made it less urgent than asked for.
	Capped bool
	// RequestedLevel differs from Level only when Capped.
	RequestedLevel int
	// QueuePosition counts requests that wait and would be served before it.
	QueuePosition int
	// PriorityIgnored is true when the policy in force does not look at priority.
	PriorityIgnored bool
	// PromptTokens is the length of the prompt.
	PromptTokens int
	// Seed in force, to produce the same output again.
	Seed uint64
}

// QueueUpdate is a new place in the queue. Updates that nobody has read yet are replaced by the newest.
type QueueUpdate struct {
	// QueuePosition counts requests that wait and would be served before it.
	QueuePosition int
}

// Started says that the request has a seat and is being computed for the first time.
type Started struct {
	// PromptTokens is the length of the prompt.
	PromptTokens int
	// CachedTokens of these were found in the prefix cache.
	CachedTokens int
	// OutputIndex says which of several outputs it is.
	OutputIndex int
}

// PromptLogprobs are log probabilities of tokens of the prompt, each told once and the first token's never.
type PromptLogprobs struct {
	// FirstTokenIndex is the index of the first of them in the prompt, from 1.
	FirstTokenIndex int
	// Positions has one entry a token.
	Positions []*vorrangv1.PositionLogprobs
}

// OutputFinished says that one of several outputs has ended; [Finished] follows when all have.
type OutputFinished struct {
	// OutputIndex says which.
	OutputIndex int
	// Finished is why, and what it cost by itself.
	Finished Finished
}

// Delta is new output; never cumulative, never repeated. Deltas that nobody has read yet are joined.
type Delta struct {
	// Text may lag behind the ids while a character or a possible stop string is incomplete.
	Text string
	// TokenIDs are the new tokens.
	TokenIDs []uint32
	// FirstTokenIndex is the index of the first of them in the output, from 0.
	FirstTokenIndex int
	// Logprobs of the new tokens, if asked for.
	Logprobs []*vorrangv1.PositionLogprobs
	// OutputIndex says which of several outputs it belongs to.
	OutputIndex int
}

// Preempted says that the request lost its seat to a more urgent one; its output goes on later without a gap.
type Preempted struct {
	// Reason is what was needed.
	Reason PreemptReason
	// Count is how often this request has been preempted, this time included.
	Count int
	// OutputIndex says which of several outputs it is.
	OutputIndex int
}

// Resumed says that the request is computed again after a preemption.
type Resumed struct {
	// RecomputedTokens must be computed again, because their KV was not in the cache.
	RecomputedTokens int
	// OutputIndex says which of several outputs it is.
	OutputIndex int
}

// PriorityChanged is a new priority, by [Stream.Reprioritize] or by an operator.
type PriorityChanged struct {
	// Level in force.
	Level int
	// Capped is true when the tenant's cap made it less urgent than asked for.
	Capped bool
	// PriorityIgnored is true when the policy in force does not look at priority.
	PriorityIgnored bool
}

// Finished is the last event of a request that ended with an output.
type Finished struct {
	// Reason is why it ended.
	Reason FinishReason
	// Usage is what it cost.
	Usage Usage
	// StopString is the one that ended it, if one did.
	StopString string
	// StopTokenID is the stop token that ended it, if one did.
	StopTokenID *uint32
}

func (Accepted) isEvent()        {}
func (QueueUpdate) isEvent()     {}
func (Started) isEvent()         {}
func (Delta) isEvent()           {}
func (Preempted) isEvent()       {}
func (Resumed) isEvent()         {}
func (PriorityChanged) isEvent() {}
func (PromptLogprobs) isEvent()  {}
func (OutputFinished) isEvent()  {}
func (Finished) isEvent()        {}

// FinishReason is why a request ended, as types.proto names it without its prefix.
type FinishReason string

// The reasons for an end.
const (
	FinishStop       FinishReason = "STOP"
	FinishStopString FinishReason = "STOP_STRING"
	FinishStopToken  FinishReason = "STOP_TOKEN"
	FinishLength     FinishReason = "LENGTH"
	FinishCapacity   FinishReason = "CAPACITY"
	FinishTimeLimit  FinishReason = "TIME_LIMIT"
	FinishCancelled  FinishReason = "CANCELLED"
)

// PreemptReason is why a request lost its seat, as types.proto names it without its prefix.
type PreemptReason string

// The reasons for a preemption.
const (
	PreemptSeats    PreemptReason = "SEATS"
	PreemptBlocks   PreemptReason = "BLOCKS"
	PreemptGrowth   PreemptReason = "GROWTH"
	PreemptOperator PreemptReason = "OPERATOR"
	PreemptRunner   PreemptReason = "RUNNER"
)

// Usage is what a request has cost.
type Usage struct {
	PromptTokens, CachedTokens, OutputTokens, RecomputedTokens, Preemptions int
	// Queued before the first admission, Prefill until the first output token, Decode from there to the end,
	// Preempted while waiting after preemptions, Parked while paused or without credit.
	Queued, Prefill, Decode, Preempted, Parked time.Duration
}

// Output is one of the outputs of a request.
type Output struct {
	// Text of the output.
	Text string
	// TokenIDs of the output.
	TokenIDs []uint32
	// Logprobs, if asked for.
	Logprobs []*vorrangv1.PositionLogprobs
	// Finished is how it ended; of an only output what the request's is.
	Finished Finished
}

// Result is a whole output.
type Result struct {
	// Text of the output; of several the first one's, as TokenIDs and Logprobs are.
	Text string
	// TokenIDs of the output.
	TokenIDs []uint32
	// Logprobs, if asked for.
	Logprobs []*vorrangv1.PositionLogprobs
	// Outputs are all outputs in order, the only one, too.
	Outputs []Output
	// PromptLogprobs has one entry for each token of the prompt but the first, if asked for.
	PromptLogprobs []*vorrangv1.PositionLogprobs
	// Accepted is what the server took.
	Accepted Accepted
	// Finished is how it ended.
	Finished Finished
}

// add puts an event into the result, but for its text.
func (r *Result) add(event Event) {
	switch event := event.(type) {
	case Accepted:
		r.Accepted = event
	case Delta:
		output := r.output(event.OutputIndex)
		output.TokenIDs = append(output.TokenIDs, event.TokenIDs...)
		output.Logprobs = append(output.Logprobs, event.Logprobs...)
	case PromptLogprobs:
		r.PromptLogprobs = append(r.PromptLogprobs, event.Positions...)
	case OutputFinished:
		r.output(event.OutputIndex).Finished = event.Finished
	case Finished:
		r.Finished = event
	}
}

func (r *Result) output(index int) *Output {
	for len(r.Outputs) <= index {
		r.Outputs = append(r.Outputs, Output{})
	}
	return &r.Outputs[index]
}

// complete says of the first output what is said of it in the result itself.
func (r *Result) complete() {
	first := r.output(0)
	if len(r.Outputs) == 1 {
		first.Finished = r.Finished
	}
	r.Text, r.TokenIDs, r.Logprobs = first.Text, first.TokenIDs, first.Logprobs
}

// eventFrame is what a session's frame and a call's have in common.
type eventFrame interface {
	GetAccepted() *vorrangv1.AcceptedEvent
	GetQueueUpdate() *vorrangv1.QueueUpdateEvent
	GetStarted() *vorrangv1.StartedEvent
	GetDelta() *vorrangv1.DeltaEvent
	GetPreempted() *vorrangv1.PreemptedEvent
	GetResumed() *vorrangv1.ResumedEvent
	GetPriorityChanged() *vorrangv1.PriorityChangedEvent
	GetFinished() *vorrangv1.FinishedEvent
	GetPromptLogprobs() *vorrangv1.PromptLogprobsEvent
	GetOutputFinished() *vorrangv1.FinishedEvent
	GetOutputIndex() uint32
}

// decode is the event of a frame; nil when it is none that this client knows.
func decode(frame eventFrame) Event {
	index := int(frame.GetOutputIndex())
	if delta := frame.GetDelta(); delta != nil {
		first := int(delta.GetFirstTokenIndex())
		return Delta{delta.GetText(), delta.GetTokenIds(), first, delta.GetLogprobs(), index}
	}
	if accepted := frame.GetAccepted(); accepted != nil {
		return decodeAccepted(accepted)
	}
	if update := frame.GetQueueUpdate(); update != nil {
		return QueueUpdate{int(update.GetQueuePosition())}
	}
	if started := frame.GetStarted(); started != nil {
		return Started{int(started.GetPromptTokens()), int(started.GetCachedTokens()), index}
	}
	if preempted := frame.GetPreempted(); preempted != nil {
		reason := strings.TrimPrefix(preempted.GetReason().String(), "PREEMPT_REASON_")
		return Preempted{PreemptReason(reason), int(preempted.GetCount()), index}
	}
	if resumed := frame.GetResumed(); resumed != nil {
		return Resumed{int(resumed.GetRecomputedTokens()), index}
	}
	if changed := frame.GetPriorityChanged(); changed != nil {
		return PriorityChanged{int(changed.GetLevel()), changed.GetCapped(), changed.GetPriorityIgnored()}
	}
	if scored := frame.GetPromptLogprobs(); scored != nil {
		return PromptLogprobs{int(scored.GetFirstTokenIndex()), scored.GetPositions()}
	}
	if finished := frame.GetOutputFinished(); finished != nil {
		return OutputFinished{index, decodeFinished(finished)}
	}
	if finished := frame.GetFinished(); finished != nil {
		return decodeFinished(finished)
	}
	return nil
}

func decodeAccepted(accepted *vorrangv1.AcceptedEvent) Accepted {
	return Accepted{
		Level:           int(accepted.GetLevel()),
		Capped:          accepted.GetCapped(),
		RequestedLevel:  int(accepted.GetRequestedLevel()),
		QueuePosition:   int(accepted.GetQueuePosition()),
		PriorityIgnored: accepted.GetPriorityIgnored(),
		PromptTokens:    int(accepted.GetPromptTokens()),
		Seed:            accepted.GetSeed(),
	}
}

func decodeFinished(finished *vorrangv1.FinishedEvent) Finished {
	return Finished{
		Reason:      FinishReason(strings.TrimPrefix(finished.GetReason().String(), "FINISH_REASON_")),
		Usage:       decodeUsage(finished.GetUsage()),
		StopString:  finished.GetStopString(),
		StopTokenID: finished.StopTokenId,
	}
}

func decodeUsage(usage *vorrangv1.Usage) Usage {
	return Usage{
		PromptTokens:     int(usage.GetPromptTokens()),
		CachedTokens:     int(usage.GetCachedTokens()),
		OutputTokens:     int(usage.GetOutputTokens()),
		RecomputedTokens: int(usage.GetRecomputedTokens()),
		Preemptions:      int(usage.GetPreemptions()),
		Queued:           usage.GetQueued().AsDuration(),
		Prefill:          usage.GetPrefill().AsDuration(),
		Decode:           usage.GetDecode().AsDuration(),
		Preempted:        usage.GetPreempted().AsDuration(),
		Parked:           usage.GetParked().AsDuration(),
	}
}
