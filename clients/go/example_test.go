package vorrang_test

import (
	"context"
	"fmt"
	"log"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

// The same lines stand in the README, where they are a program.
func Example() {
	ctx := context.Background()
	client, err := vorrang.Dial(ctx, "127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	session, err := client.Session(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()

	report, err := session.Start(ctx, vorrang.Request{Prompt: "Once upon a time"},
		vorrang.WithPriority(vorrang.Batch), vorrang.WithMaxTokens(64))
	if err != nil {
		log.Fatal(err)
	}
	capital := []vorrang.Message{{Role: "user", Content: "What is the capital of France?"}}
	question, err := session.Start(ctx, vorrang.Request{Messages: capital},
		vorrang.WithPriority(vorrang.Interactive), vorrang.WithMaxTokens(16), vorrang.WithTemperature(0))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print("question: ")
	for event, err := range question.Events(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		if delta, ok := event.(vorrang.Delta); ok {
			fmt.Print(delta.Text)
		}
	}
	result, err := report.Result(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\nreport: %s (%d times preempted)\n", result.Text, result.Finished.Usage.Preemptions)
}
