package vorrang_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

func TestSeveralOutputsAndLogProbabilities(t *testing.T) {
	const numOutputs, numTokens = 3, 6
	prompt := "a prompt that is longer than a block of the pool"
	request := vorrang.Request{Prompt: prompt, Sampling: &vorrangv1.SamplingParams{
		Temperature: proto.Float32(1), Seed: proto.Uint64(9)}}
	options := []vorrang.RequestOption{vorrang.WithMaxTokens(numTokens), vorrang.WithOutputs(numOutputs),
		vorrang.WithLogprobs(2), vorrang.WithPromptLogprobs(1)}
	client := dial(t, serve(t).Address)
	stream, err := open(t, client).Start(within(t), request, options...)
	if err != nil {
		t.Fatal(err)
	}
	whole := result(t, stream)
	unary, err := client.Generate(within(t), request, options...)
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range []*vorrang.Result{whole, unary} {
		if len(got.Outputs) != numOutputs {
			t.Fatalf("there are %d outputs", len(got.Outputs))
		}
		for index, output := range got.Outputs {
			if len(output.TokenIDs) != numTokens || len(output.Logprobs) != numTokens || len(output.Text) != numTokens {
				t.Errorf("output %d is %+v", index, output)
			}
			if output.Finished.Reason != vorrang.FinishLength || output.Finished.Usage.OutputTokens != numTokens {
				t.Errorf("output %d ended with %+v", index, output.Finished)
			}
			if output.Text != unary.Outputs[index].Text {
				t.Errorf("output %d is %q and %q", index, output.Text, unary.Outputs[index].Text)
			}
			if got := len(output.Logprobs[0].GetTop()); got != 2 {
				t.Errorf("there are %d likeliest tokens", got)
			}
		}
		if got.Outputs[0].Text == got.Outputs[1].Text {
			t.Error("two outputs are the same")
		}
		if got.Text != got.Outputs[0].Text || got.Finished.Usage.OutputTokens != numOutputs*numTokens {
			t.Errorf("the whole is %+v", got)
		}
		if len(got.PromptLogprobs) != len(prompt)-1 {
			t.Fatalf("%d tokens of the prompt are scored", len(got.PromptLogprobs))
		}
		if got := len(got.PromptLogprobs[0].GetTop()); got != 1 {
			t.Errorf("there are %d likeliest tokens of the prompt", got)
		}
	}
}
