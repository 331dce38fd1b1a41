// Command vorrang-chat is a conversation on the terminal that shows what the scheduler does to it.
//
//	go run ./cmd/vorrang-chat -address 127.0.0.1:50051 -priority interactive
//
// Lines are asked and answered in turn; with piped input that is all. On a terminal, lines that start with a slash
// also steer the answer under way, and Ctrl-C stops it.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	vorrang "github.com/vorrang/vorrang/clients/go"
)

const help = "/priority NAME or LEVEL, /pause, /unpause and /stop steer the answer under way; /reset forgets; " +
	"/quit leaves; Ctrl-C stops an answer"

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program; it returns the exit status.
func run(arguments []string, input io.Reader, output, diagnostics io.Writer) int {
	flags := flag.NewFlagSet("vorrang-chat", flag.ContinueOnError)
	flags.SetOutput(diagnostics)
	address := flags.String("address", "127.0.0.1:50051", "host:port of the server")
	plaintext := flags.Bool("plaintext", false, "speak plaintext to more than loopback")
	tokenFrom := flags.String("token-env", "VORRANG_TOKEN", "environment variable with the bearer token, if there is one")
	priority := flags.String("priority", "interactive", "class name or level of the answers")
	system := flags.String("system", "", "system message")
	maxTokens := flags.Uint("max-tokens", 256, "longest answer, in tokens")
	temperature := flags.Float64("temperature", 0.7, "0 = always the likeliest token")
	if err := flags.Parse(arguments); err != nil {
		return 2
	}
	options := []vorrang.DialOption{}
	if token := os.Getenv(*tokenFrom); token != "" {
		options = append(options, vorrang.WithToken(token))
	}
	if *plaintext {
		options = append(options, vorrang.WithPlaintext())
	}
	conversation := &conversation{
		priority:    vorrang.ParsePriority(*priority),
		maxTokens:   uint32(*maxTokens),
		temperature: float32(*temperature),
		view:        newView(output, diagnostics, isTerminal(input) && isTerminal(output)),
	}
	if *system != "" {
		conversation.system = []vorrang.Message{{Role: "system", Content: *system}}
	}
	if err := conversation.run(*address, options, input); err != nil {
		_, _ = fmt.Fprintln(diagnostics, err)
		return 1
	}
	return 0
}

func isTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// conversation is the turns so far and how the next answer is to be made.
type conversation struct {
	system, turns []vorrang.Message
	priority      vorrang.Priority
	maxTokens     uint32
	temperature   float32
	view          *view
	session       *vorrang.Session
	leaving       bool
}

func (c *conversation) run(address string, options []vorrang.DialOption, input io.Reader) error {
	reach, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	client, err := vorrang.Dial(reach, address, options...)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	c.session, err = client.Session(context.Background(), vorrang.WithClientName("vorrang-chat"))
	if err != nil {
		return err
	}
	defer func() { _ = c.session.Close() }()
	return c.converse(readLines(input))
}

// readLines reads in a goroutine, which ends with the program: a read can't be interrupted.
func readLines(input io.Reader) <-chan string {
	lines := make(chan string)
	go func() {
		defer close(lines)
		scanner := bufio.NewScanner(input)
		scanner.Buffer(nil, 1<<20)
		for scanner.Scan() {
			lines <- scanner.Text()
		}
	}()
	return lines
}

func (c *conversation) converse(lines <-chan string) error {
	c.view.say(help)
	for {
		c.view.prompt(c.priority)
		line, ok := <-lines
		command, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case !ok, command == "/quit":
			return nil
		case command == "":
		case command == "/reset":
			c.turns = nil
		case command == "/priority":
			c.priority = vorrang.ParsePriority(strings.TrimSpace(argument))
		case strings.HasPrefix(command, "/"):
			c.view.say(help)
		default:
			if err := c.ask(line, lines); err != nil || c.leaving {
				return err
			}
		}
	}
}

// ask answers one line. The error is one with which nothing more can be asked.
func (c *conversation) ask(line string, lines <-chan string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	asked := append(c.turns[:len(c.turns):len(c.turns)], vorrang.Message{Role: "user", Content: line})
	stream, err := c.session.Start(ctx, vorrang.Request{
		Messages: append(c.system[:len(c.system):len(c.system)], asked...),
		Label:    "vorrang-chat",
	}, vorrang.WithPriority(c.priority), vorrang.WithMaxTokens(c.maxTokens), vorrang.WithTemperature(c.temperature))
	if err != nil {
		return err
	}
	steered, ended := context.WithCancel(context.Background())
	steering := make(chan struct{})
	go func() {
		defer close(steering)
		if c.view.terminal {
			c.steer(steered, stream, lines)
		}
	}()
	answer, err := c.follow(stream)
	ended()
	<-steering
	c.view.end(answer, err)
	if answer != "" {
		c.turns = append(asked, vorrang.Message{Role: "assistant", Content: answer})
	}
	if errors.Is(err, vorrang.ErrDisconnected) {
		return err
	}
	return nil
}

// follow shows an answer to its end, across losses of the connection.
func (c *conversation) follow(stream *vorrang.Stream) (string, error) {
	var answer strings.Builder
	for {
		event, err := stream.Recv(context.Background())
		if errors.Is(err, vorrang.ErrDisconnected) {
			c.view.state("the connection is lost")
			if c.resume() == nil {
				continue
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return answer.String(), err
		}
		if delta, ok := event.(vorrang.Delta); ok {
			answer.WriteString(delta.Text)
		}
		c.view.show(event)
	}
}

// resume takes the session up again, trying for a while.
func (c *conversation) resume() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return c.session.Resume(ctx)
}

// steer obeys what is typed while an answer is made, until ctx ends.
func (c *conversation) steer(ctx context.Context, stream *vorrang.Stream, lines <-chan string) {
	for {
		select {
		case <-ctx.Done():
			return
		case line, ok := <-lines:
			if !ok {
				return
			}
			command, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
			var err error
			switch command {
			case "/priority":
				priority := vorrang.ParsePriority(strings.TrimSpace(argument))
				if _, err = stream.Reprioritize(ctx, priority); err == nil {
					c.priority = priority
				}
			case "/pause":
				if err = stream.Pause(ctx); err == nil {
					c.view.state("paused")
				}
			case "/unpause":
				if err = stream.Unpause(ctx); err == nil {
					c.view.state("going on")
				}
			case "/stop":
				err = stream.Cancel(ctx)
			case "/quit":
				c.leaving = true
				err = stream.Cancel(ctx)
			default:
				c.view.say(help)
			}
			if err != nil {
				c.view.say(err.Error())
			}
		}
	}
}
