package vorrang_test

import (
	"errors"
	"strings"
	"testing"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

func TestAChoiceIsObeyedAndOtherGrammarsAreRefusedByAScriptedModel(t *testing.T) {
	client := dial(t, serve(t).Address)
	request := vorrang.Request{Prompt: "is it?"}
	got, err := client.Generate(within(t), request, vorrang.WithChoice("yes", "no"))
	if err != nil {
		t.Fatal(err)
	}
	if (got.Text != "yes" && got.Text != "no") || got.Finished.Reason != vorrang.FinishStop {
		t.Errorf("the answer is %q, which ended with %v", got.Text, got.Finished.Reason)
	}
	for field, option := range map[string]vorrang.RequestOption{
		"grammar.regex":       vorrang.WithRegex("a+"),
		"grammar.ebnf":        vorrang.WithEBNF(`root ::= "a"`),
		"grammar.json_schema": vorrang.WithJSONSchema(`{"type": "integer"}`),
	} {
		_, err := client.Generate(within(t), request, option)
		var failed *vorrang.Error
		if !errors.As(err, &failed) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is answered by %v", field, err)
		}
	}
}
