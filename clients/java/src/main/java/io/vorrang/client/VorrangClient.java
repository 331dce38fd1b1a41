package io.vorrang.client;

import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.vorrang.v1.DetokenizeRequest;
import io.vorrang.v1.GenerateRequest;
import io.vorrang.v1.GenerateStreamRequest;
import io.vorrang.v1.GenerationServiceGrpc;
import io.vorrang.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import io.vorrang.v1.GetModelRequest;
import io.vorrang.v1.GetModelResponse;
import io.vorrang.v1.TokenizeRequest;
import java.io.File;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * The client of one server. Thread-safe; one is enough for a program.
 *
 * <pre>{@code
 * try (var client = VorrangClient.builder().target("127.0.0.1:50051").build();
 *     var session = client.openSession()) {
 *   for (Event event : session.start(Request.text("Once upon a time").maxTokens(64).build())) {
 *     if (event instanceof Event.Delta delta) System.out.print(delta.text());
 *   }
 * }
 * }</pre>
 */
public final class VorrangClient implements AutoCloseable {
  private static final Duration READY_POLL = Duration.ofMillis(100);

  private final Transport transport;
  private final Duration callTimeout;

  private VorrangClient(Builder builder) {
    var executor = Transport.newExecutor();
    transport = new Transport(builder.channel(executor), executor);
    callTimeout = builder.callTimeout;
  }

  /** A client with its defaults: plaintext, to 127.0.0.1:50051. */
  public static Builder builder() {
    return new Builder();
  }

  /** Opens a session with default options; see {@link #openSession(SessionOptions)}. */
  public Session openSession() {
    return openSession(SessionOptions.builder().build());
  }

  /**
   * Opens a session and waits for the server's answer.
   *
   * @throws VorrangException the server can't be reached ({@link ConnectionLostException}), did not
   *     answer in time or refused; or the thread was interrupted
   * @throws IllegalStateException the client is closed
   */
  public Session openSession(SessionOptions options) {
    var session = new Session(transport, options);
    transport.remember(session, session::close);
    session.open();
    return session;
  }

  /** One request as a call of its own, without a deadline; see {@link #generate(Request, Duration)}. */
  public Result generate(Request request) {
    return generate(request, Duration.ZERO);
  }

  /**
   * One request, one answer; waits for it.
   *
   * @param timeout deadline of the call; zero = none
   * @throws VorrangException the request was refused or failed, the server can't be reached or the
   *     deadline has passed
   */
  public Result generate(Request request, Duration timeout) {
    var message =
        GenerateRequest.newBuilder().setRequestId(request.id()).setSpec(request.spec()).build();
    return Wire.result(call(timeout, stub -> stub.generate(message)));
  }

  /** One request as a streaming call, without a deadline; see {@link #generateStream(Request, Duration)}. */
  public CallStream generateStream(Request request) {
    return generateStream(request, Duration.ZERO);
  }

  /**
   * One request as a server-stream call of its own. Returns at once; a refusal is the stream's failure.
   *
   * @param timeout deadline of the call; zero = none
   * @throws IllegalStateException the client is closed
   */
  public CallStream generateStream(Request request, Duration timeout) {
    var message =
        GenerateStreamRequest.newBuilder()
            .setRequestId(request.id())
            .setSpec(request.spec())
            .build();
    var stream = new CallStream(request.id(), transport.executor(), transport::forget);
    transport.remember(stream, stream::abandon);
    var stub = transport.stub();
    stream.start(
        timeout.isZero() ? stub : stub.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS),
        message);
    return stream;
  }

  /** Token ids of a text; throws as {@link #generate(Request, Duration)} does. */
  public List<Integer> tokenize(String text) {
    return tokenize(Request.text(text).build());
  }

  /** Token ids of a request's prompt, such as a conversation; throws as {@link #tokenize(String)}. */
  public List<Integer> tokenize(Request request) {
    var message = TokenizeRequest.newBuilder().setPrompt(request.spec().getPrompt()).build();
    return call(callTimeout, stub -> stub.tokenize(message)).getTokenIdsList();
  }

  /** Text of token ids, special tokens left out; throws as {@link #tokenize(String)}. */
  public String detokenize(List<Integer> tokenIds) {
    var message = DetokenizeRequest.newBuilder().addAllTokenIds(tokenIds).build();
    return call(callTimeout, stub -> stub.detokenize(message)).getText();
  }

  /** The model that is served, and the server's limits; throws as {@link #tokenize(String)}. */
  public GetModelResponse model() {
    return call(callTimeout, stub -> stub.getModel(GetModelRequest.getDefaultInstance()));
  }

  /**
   * Waits until the server answers and its model is loaded.
   *
   * @throws VorrangException it was not within {@code timeout}: what it said last
   */
  public void awaitReady(Duration timeout) {
    long endNanos = System.nanoTime() + timeout.toNanos();
    while (true) {
      try {
        model();
        return;
      } catch (VorrangException notYet) {
        if (!notYet.retryable() || System.nanoTime() - endNanos >= 0) {
          throw notYet;
        }
      }
      try {
        Thread.sleep(READY_POLL.toMillis());
      } catch (InterruptedException interruption) {
        throw VorrangException.interrupted();
      }
      transport.resetConnectBackoff();
    }
  }

  /**
   * Closes sessions and streams, cancelling what still runs, and then the connection. Waits a few
   * seconds at most.
   */
  @Override
  public void close() {
    transport.close();
  }

  Transport transport() {
    return transport;
  }

  private <T> T call(Duration timeout, Function<GenerationServiceBlockingStub, T> method) {
    var stub = GenerationServiceGrpc.newBlockingStub(transport.channel());
    try {
      return method.apply(
          timeout.isZero()
              ? stub
              : stub.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS));
    } catch (StatusRuntimeException error) {
      throw Errors.ofCall(error);
    }
  }

  /** Makes a {@link VorrangClient}. */
  public static final class Builder {
    private String target = "127.0.0.1:50051";
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private BearerToken token;
    private boolean isPlaintext = true;
    private boolean tokenMayBePlain;
    private Duration keepAlive = Duration.ofSeconds(30);
    private Duration keepAliveTimeout = Duration.ofSeconds(10);
    private Duration callTimeout = Duration.ofSeconds(30);
    private int maxMessageBytes = 16 * 1024 * 1024;

    private Builder() {}

    /** Address as gRPC writes it, such as {@code 127.0.0.1:50051}. */
    public Builder target(String target) {
      this.target = Objects.requireNonNull(target);
      return this;
    }

    /** TLS; the server's certificate is checked against what the Java runtime trusts. */
    public Builder tls() {
      return credentials(TlsChannelCredentials.create());
    }

    /**
     * TLS; the server's certificate is checked against these certificates.
     *
     * @param trusted certificates in PEM
     * @throws IOException the file can't be read
     */
    public Builder tls(File trusted) throws IOException {
      return credentials(TlsChannelCredentials.newBuilder().trustManager(trusted).build());
    }

    /**
     * TLS by which both sides show who they are.
     *
     * @param trusted certificates in PEM the server's is checked against
     * @param certificate this client's certificate chain in PEM
     * @param privateKey its key in PKCS#8 PEM
     * @throws IOException a file can't be read
     */
    public Builder tls(File trusted, File certificate, File privateKey) throws IOException {
      return credentials(
          TlsChannelCredentials.newBuilder()
              .trustManager(trusted)
              .keyManager(certificate, privateKey)
              .build());
    }

    /** Any other channel credentials. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = Objects.requireNonNull(credentials);
      isPlaintext = credentials instanceof InsecureChannelCredentials;
      return this;
    }

    /** Bearer token, sent with every call as {@code authorization}. */
    public Builder token(String token) {
      this.token = new BearerToken(token);
      return this;
    }

    /** Allows the token to be sent without TLS to more than this machine. */
    public Builder plaintextToken(boolean allowed) {
      tokenMayBePlain = allowed;
      return this;
    }

    /**
     * Silence after which the connection is probed, while calls are open on it, and the longest wait
     * for the answer. Default 30 s and 10 s. Vorrang allows pings every 10 s; many proxies end
     * connections for more than one in 300 s.
     */
    public Builder keepAlive(Duration interval, Duration timeout) {
      keepAlive = interval;
      keepAliveTimeout = timeout;
      return this;
    }

    /** Deadline of calls that generate nothing; default 30 s. */
    public Builder callTimeout(Duration timeout) {
      callTimeout = Objects.requireNonNull(timeout);
      return this;
    }

    /** Largest message that is accepted from the server, in bytes; default 16 MiB. */
    public Builder maxMessageBytes(int bytes) {
      maxMessageBytes = bytes;
      return this;
    }

    /**
     * The client. It connects when it is first used.
     *
     * @throws IllegalStateException a token would go over the network in plaintext
     */
    public VorrangClient build() {
      if (token != null && isPlaintext && !tokenMayBePlain && !isLoopback(target)) {
        throw new IllegalStateException(
            "a token needs TLS on the way to " + target + "; plaintextToken(true) allows it anyway");
      }
      return new VorrangClient(this);
    }

    private ManagedChannel channel(Executor executor) {
      var channel =
          Grpc.newChannelBuilder(target, credentials)
              .executor(executor)
              .keepAliveTime(keepAlive.toNanos(), TimeUnit.NANOSECONDS)
              .keepAliveTimeout(keepAliveTimeout.toNanos(), TimeUnit.NANOSECONDS)
              .keepAliveWithoutCalls(false)
              .maxInboundMessageSize(maxMessageBytes)
              .defaultServiceConfig(SERVICE_CONFIG)
              .enableRetry();
      if (token != null) {
        channel.intercept(token);
      }
      return channel.build();
    }

    private static boolean isLoopback(String target) {
      String host = target.substring(target.lastIndexOf('/') + 1);
      return target.startsWith("unix:")
          || host.matches("127\\.[0-9.]+(:[0-9]+)?")
          || host.startsWith("localhost:")
          || host.startsWith("[::1]:");
    }
  }

  /** Safe to retry: the server sends initial metadata only once it has taken a request. */
  private static final Map<String, Object> SERVICE_CONFIG =
      Map.of(
          "methodConfig",
          List.of(
              Map.of(
                  "name",
                  List.of("GenerateStream", "Generate", "Tokenize", "Detokenize", "GetModel").stream()
                      .map(name -> Map.of("service", GenerationServiceGrpc.SERVICE_NAME, "method", name))
                      .toList(),
                  "retryPolicy",
                  Map.of(
                      "maxAttempts", 4.0,
                      "initialBackoff", "0.1s",
                      "maxBackoff", "2s",
                      "backoffMultiplier", 2.0,
                      "retryableStatusCodes", List.of("UNAVAILABLE")))));
}
