package vorrang

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

const (
	// The server answers pings that come more often than every 10 s by closing the connection.
	minKeepaliveTime     = 10 * time.Second
	defaultKeepaliveTime = 30 * time.Second
	defaultKeepaliveWait = 10 * time.Second
	connectWait          = 5 * time.Second
)

// A lost session is held for about 10 s, which gRPC's own backoff, from 1 s to 2 minutes, could miss.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}

// Only calls are retried, never sessions. The server sends initial metadata when it has accepted a call, and
// gRPC retries none that has got that far, so nothing is computed twice.
const serviceConfig = `{"methodConfig": [{
	"name": [
		{"service": "vorrang.v1.GenerationService", "method": "Generate"},
		{"service": "vorrang.v1.GenerationService", "method": "GenerateStream"},
		{"service": "vorrang.v1.GenerationService", "method": "GetModel"}
	],
	"retryPolicy": {
		"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE"]
	}
}]}`

// DialOption says how to reach the server.
type DialOption func(*dialSettings)

type dialSettings struct {
	tls       *tls.Config
	plaintext bool
	token     string
	keepalive keepalive.ClientParameters
	grpc      []grpc.DialOption
}

// WithTLS uses this TLS configuration. The default is plaintext to a loopback address, and TLS with the system's
// certificate authorities to any other.
func WithTLS(config *tls.Config) DialOption { return func(s *dialSettings) { s.tls = config } }

// WithPlaintext speaks plaintext to any address.
func WithPlaintext() DialOption { return func(s *dialSettings) { s.plaintext = true } }

// WithToken sends a bearer token with every call. It is never sent in plaintext but to a loopback address.
func WithToken(token string) DialOption { return func(s *dialSettings) { s.token = token } }

// WithKeepalive pings the server after so long without anything from it, and takes the connection for lost when no
// answer comes within wait. The server forbids less than 10 s; the default is 30 s and 10 s.
func WithKeepalive(after, wait time.Duration) DialOption {
	return func(s *dialSettings) { s.keepalive.Time, s.keepalive.Timeout = after, wait }
}

// WithGRPC passes options to gRPC, such as interceptors.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(s *dialSettings) { s.grpc = append(s.grpc, options...) }
}

// Client is a connection to a server. It is safe for use by many goroutines.
type Client struct {
	connection *grpc.ClientConn
	stub       vorrangv1.GenerationServiceClient
}

// Dial connects to "host:port".
//
// It returns when the server has answered, be its model still loading or not; ctx bounds that alone.
// The error is an [*Error] when the server can't be reached.
func Dial(ctx context.Context, address string, options ...DialOption) (*Client, error) {
	settings := dialSettings{keepalive: keepalive.ClientParameters{
		Time: defaultKeepaliveTime, Timeout: defaultKeepaliveWait, PermitWithoutStream: true,
	}}
	for _, option := range options {
		option(&settings)
	}
	grpcOptions, err := settings.grpcOptions(address)
	if err != nil {
		return nil, err
	}
	connection, err := grpc.NewClient(address, grpcOptions...)
	if err != nil {
		return nil, fmt.Errorf("vorrang: %q can't be dialled: %w", address, err)
	}
	_, err = grpc_health_v1.NewHealthClient(connection).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if answer := errorFromCall(err); answer != nil {
		if grpcError := new(Error); errors.As(answer, &grpcError) && grpcError.Code != codes.Unimplemented {
			_ = connection.Close()
			return nil, answer
		}
	}
	return &Client{connection, vorrangv1.NewGenerationServiceClient(connection)}, nil
}

func (s *dialSettings) grpcOptions(address string) ([]grpc.DialOption, error) {
	if s.keepalive.Time < minKeepaliveTime {
		return nil, fmt.Errorf("vorrang: keepalive must be at least %v, got %v", minKeepaliveTime, s.keepalive.Time)
	}
	loopback := isLoopback(address)
	transport := insecure.NewCredentials()
	if s.tls != nil || (!s.plaintext && !loopback) {
		transport = credentials.NewTLS(s.tls)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(s.keepalive),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: connectWait}),
		grpc.WithDefaultServiceConfig(serviceConfig),
	}
	if s.token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer{s.token, !loopback}))
	}
	return append(options, s.grpc...), nil
}

// bearer is a token in the metadata of every call.
type bearer struct {
	token      string
	secureOnly bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.secureOnly }

func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}

// Close ends the connection and everything on it. Close sessions first: it cancels their requests at once, where the
// server would otherwise wait for somebody to take them up.
func (c *Client) Close() error { return c.connection.Close() }

// Stub is the generated client, for calls that have no method here.
func (c *Client) Stub() vorrangv1.GenerationServiceClient { return c.stub }

// Model says what is served, and the server's limits.
func (c *Client) Model(ctx context.Context) (*vorrangv1.GetModelResponse, error) {
	model, err := c.stub.GetModel(ctx, &vorrangv1.GetModelRequest{})
	return model, errorFromCall(err)
}

// Generate waits for a whole output. The end of ctx cancels the request on the server.
func (c *Client) Generate(ctx context.Context, request Request, options ...RequestOption) (*Result, error) {
	settings, err := request.settings(options)
	if err != nil {
		return nil, err
	}
	response, err := c.stub.Generate(ctx, &vorrangv1.GenerateRequest{Spec: settings.spec, RequestId: settings.id})
	if err != nil {
		return nil, errorFromCall(err)
	}
	result := &Result{
		PromptLogprobs: response.GetPromptLogprobs(),
		Accepted:       decodeAccepted(response.GetAccepted()),
		Finished:       decodeFinished(response.GetFinished()),
	}
	*result.output(0) = Output{
		Text: response.GetText(), TokenIDs: response.GetTokenIds(), Logprobs: response.GetLogprobs()}
	for index, output := range response.GetOutputs() {
		*result.output(index) = Output{
			output.GetText(), output.GetTokenIds(), output.GetLogprobs(), decodeFinished(output.GetFinished())}
	}
	result.complete()
	return result, nil
}
