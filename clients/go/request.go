package vorrang

import (
	"context"
	"errors"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// Priority is how urgent a request is: a level or the name of a class. The zero value is level 0.
type Priority struct {
	level int32
	class string
}

// The classes that every server knows.
var (
	Interactive = Class("interactive")
	Standard    = Class("standard")
	Batch       = Class("batch")
)

// Level is a priority from -100 to 100; lower is more urgent and 0 the usual one.
func Level(level int) Priority { return Priority{level: int32(level)} }

// Class is the priority that a name stands for.
func Class(name string) Priority { return Priority{class: name} }

// ParsePriority reads a level, or the name of a class.
func ParsePriority(text string) Priority {
	if level, err := strconv.ParseInt(text, 10, 32); err == nil {
		return Level(int(level))
	}
	return Class(text)
}

// String is the name or the level.
func (p Priority) String() string {
	if p.class != "" {
		return p.class
	}
	return strconv.Itoa(int(p.level))
}

// mayBecome says whether the server may make this level of it, as far as is known here.
func (p Priority) mayBecome(level int) bool {
	switch p {
	case Interactive:
		return level == -10
	case Standard:
		return level == 0
	case Batch:
		return level == 10
	}
	return p.class != "" || int(p.level) == level
}

func (p Priority) wire() *vorrangv1.Priority {
	if p.class != "" {
		return &vorrangv1.Priority{Value: &vorrangv1.Priority_ClassName{ClassName: p.class}}
	}
	return &vorrangv1.Priority{Value: &vorrangv1.Priority_Level{Level: p.level}}
}

// Message is one turn of a conversation.
type Message struct {
	// Role is "system", "user", "assistant", or what else the model's template knows.
	Role string
	// Content is the text.
	Content string
}

// Request is what the model is to continue: exactly one of Prompt, Messages and TokenIDs.
type Request struct {
	// Prompt is plain text.
	Prompt string
	// Messages is a conversation, oldest turn first.
	Messages []Message
	// TokenIDs are taken as they are.
	TokenIDs []uint32
	// Sampling says how tokens are chosen; nil = the server's defaults. [WithMaxTokens] and
	// [WithTemperature] come on top.
	Sampling *vorrangv1.SamplingParams
	// Label is free text for the server's logs.
	Label string
	// Model is the name of the model; empty = the one that is served.
	Model string
}

// RequestOption says how a request is to be run.
type RequestOption func(*requestSettings)

type requestSettings struct {
	id           string
	spec         *vorrangv1.GenerationSpec
	manualCredit bool
}

// WithRequestID chooses the id, unique in the tenant: 1 to 128 bytes of printable ASCII. The default is random.
func WithRequestID(id string) RequestOption { return func(s *requestSettings) { s.id = id } }

// WithPriority says how urgent the request is.
func WithPriority(priority Priority) RequestOption {
	return func(s *requestSettings) { s.spec.Priority = priority.wire() }
}

// WithAdapter chooses a LoRA adapter by name, one of those that [Client.Model] lists.
func WithAdapter(name string) RequestOption {
	return func(s *requestSettings) { s.spec.Adapter = name }
}

// WithQueueTimeout bounds the wait for the first computation; then the request ends with [FinishTimeLimit].
func WithQueueTimeout(timeout time.Duration) RequestOption {
	return func(s *requestSettings) { s.spec.QueueTimeout = durationpb.New(timeout) }
}

// WithTotalTimeout bounds the whole request; what was produced by then stands, with [FinishTimeLimit].
func WithTotalTimeout(timeout time.Duration) RequestOption {
	return func(s *requestSettings) { s.spec.TotalTimeout = durationpb.New(timeout) }
}

// WithCredit bounds how many output tokens may be under way to a reader who does not read, at least 1.
// What is read is granted again by itself. For sessions alone; the default is the server's window.
func WithCredit(tokens uint32) RequestOption {
	return func(s *requestSettings) { s.spec.CreditTokens = proto.Uint32(tokens) }
}

// WithManualCredit lets the request produce so many tokens, and no more until [Stream.Credit] grants them.
// For sessions alone.
func WithManualCredit(tokens uint32) RequestOption {
	return func(s *requestSettings) {
		s.spec.CreditTokens = proto.Uint32(tokens)
		s.manualCredit = true
	}
}

// WithMaxTokens bounds the output.
func WithMaxTokens(tokens uint32) RequestOption {
	return func(s *requestSettings) { s.sampling().MaxTokens = proto.Uint32(tokens) }
}

// WithJSONSchema has the output obey a JSON schema. Of this, [WithRegex], [WithEBNF] and [WithChoice] the last one counts.
func WithJSONSchema(schema string) RequestOption {
	return withGrammar(&vorrangv1.Grammar{Value: &vorrangv1.Grammar_JsonSchema{JsonSchema: schema}})
}

// WithRegex has the whole output match a regular expression.
func WithRegex(expression string) RequestOption {
	return withGrammar(&vorrangv1.Grammar{Value: &vorrangv1.Grammar_Regex{Regex: expression}})
}

// WithEBNF has the output obey a grammar in the form of GBNF; it begins with the rule "root".
func WithEBNF(grammar string) RequestOption {
	return withGrammar(&vorrangv1.Grammar{Value: &vorrangv1.Grammar_Ebnf{Ebnf: grammar}})
}

// WithChoice has the output be one of several answers.
func WithChoice(answers ...string) RequestOption {
	choice := &vorrangv1.Choice{Options: answers}
	return withGrammar(&vorrangv1.Grammar{Value: &vorrangv1.Grammar_Choice{Choice: choice}})
}

func withGrammar(grammar *vorrangv1.Grammar) RequestOption {
	return func(s *requestSettings) { s.spec.Grammar = grammar }
}

// WithOutputs asks for several outputs of the prompt, each with a seed of its own; see [Result.Outputs].
func WithOutputs(count uint32) RequestOption {
	return func(s *requestSettings) { s.spec.NumOutputs = proto.Uint32(count) }
}

// WithLogprobs asks for the log probability of each token, and of so many likeliest ones.
func WithLogprobs(top uint32) RequestOption {
	return func(s *requestSettings) { s.sampling().Logprobs = proto.Uint32(top) }
}

// WithPromptLogprobs asks for the same of the tokens of the prompt; see [Result.PromptLogprobs].
func WithPromptLogprobs(top uint32) RequestOption {
	return func(s *requestSettings) { s.sampling().PromptLogprobs = proto.Uint32(top) }
}

// WithTemperature sets the softmax temperature; 0 = greedy.
func WithTemperature(temperature float32) RequestOption {
	return func(s *requestSettings) { s.sampling().Temperature = proto.Float32(temperature) }
}

// WithSpec changes the wire message last, for what has no option of its own.
func WithSpec(change func(*vorrangv1.GenerationSpec)) RequestOption {
	return func(s *requestSettings) { change(s.spec) }
}

func (s *requestSettings) sampling() *vorrangv1.SamplingParams {
	if s.spec.Sampling == nil {
		s.spec.Sampling = &vorrangv1.SamplingParams{}
	}
	return s.spec.Sampling
}

// settings turns a request and its options into what is sent.
func (r Request) settings(options []RequestOption) (*requestSettings, error) {
	prompt, err := r.prompt()
	if err != nil {
		return nil, err
	}
	settings := &requestSettings{spec: &vorrangv1.GenerationSpec{
		Prompt:   prompt,
		Sampling: proto.CloneOf(r.Sampling), // it is sent later, when the caller may have changed it
		Label:    r.Label,
		Model:    r.Model,
	}}
	for _, option := range options {
		option(settings)
	}
	return settings, nil
}

func (r Request) prompt() (*vorrangv1.Prompt, error) {
	given := 0
	prompt := &vorrangv1.Prompt{Value: &vorrangv1.Prompt_Text{Text: r.Prompt}}
	if r.Prompt != "" {
		given++
	}
	if r.Messages != nil {
		given++
		chat := &vorrangv1.ChatPrompt{}
		for _, message := range r.Messages {
			chat.Messages = append(chat.Messages, &vorrangv1.ChatMessage{Role: message.Role, Content: message.Content})
		}
		prompt.Value = &vorrangv1.Prompt_Chat{Chat: chat}
	}
	if r.TokenIDs != nil {
		given++
		ids := append([]uint32(nil), r.TokenIDs...)
		prompt.Value = &vorrangv1.Prompt_Tokens{Tokens: &vorrangv1.TokenIds{Ids: ids}}
	}
	if given > 1 {
		return nil, errors.New("vorrang: give exactly one of Prompt, Messages and TokenIDs")
	}
	return prompt, nil // an empty text is the server's to refuse, as EMPTY_PROMPT
}

// boundBy makes the server know a context's deadline, so that it holds even when no cancel gets there.
func (s *requestSettings) boundBy(ctx context.Context) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return
	}
	remaining := max(time.Until(deadline), time.Nanosecond)
	if given := s.spec.GetTotalTimeout(); given == nil || remaining < given.AsDuration() {
		s.spec.TotalTimeout = durationpb.New(remaining)
	}
}
