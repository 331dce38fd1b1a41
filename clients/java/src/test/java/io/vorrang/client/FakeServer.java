package io.vorrang.client;

import com.google.protobuf.Any;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerCredentials;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import io.vorrang.v1.GenerateRequest;
import io.vorrang.v1.GenerateResponse;
import io.vorrang.v1.GenerationServiceGrpc.GenerationServiceImplBase;
import io.vorrang.v1.OpenedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.BiConsumer;

/** A server in this process that answers as a test says: for what the real one can't be brought to say. */
final class FakeServer extends GenerationServiceImplBase implements AutoCloseable {
  final List<String> authorizations = new CopyOnWriteArrayList<>();
  final List<SessionRequest> frames = new CopyOnWriteArrayList<>();
  volatile com.google.rpc.Status refusal = com.google.rpc.Status.getDefaultInstance();
  volatile BiConsumer<SessionRequest, StreamObserver<SessionResponse>> answers = (frame, out) -> {};
  volatile int numEndedTogether = 1;
  private final List<StreamObserver<SessionResponse>> halfClosed = new ArrayList<>();
  private final Server server;

  FakeServer() throws IOException {
    this(InsecureServerCredentials.create());
  }

  FakeServer(ServerCredentials credentials) throws IOException {
    server =
        Grpc.newServerBuilderForPort(0, credentials).addService(this).intercept(new Spy()).build();
    server.start();
  }

  String address() {
    return "127.0.0.1:" + port();
  }

  int port() {
    return server.getPort();
  }

  @Override
  public void generate(GenerateRequest request, StreamObserver<GenerateResponse> out) {
    if (refusal.getCode() == 0) {
      out.onNext(GenerateResponse.newBuilder().setText("hello").build());
      out.onCompleted();
    } else {
      out.onError(StatusProto.toStatusRuntimeException(refusal));
    }
  }

  @Override
  public StreamObserver<SessionRequest> session(StreamObserver<SessionResponse> out) {
    return new StreamObserver<>() {
      @Override
      public void onNext(SessionRequest frame) {
        frames.add(frame);
        if (frame.hasOpen()) {
          out.onNext(
              SessionResponse.newBuilder()
                  .setOpened(OpenedEvent.newBuilder().setSessionToken("token"))
                  .build());
        } else {
          answers.accept(frame, out);
        }
      }

      @Override
      public void onError(Throwable gone) {}

      @Override
      public void onCompleted() {
        synchronized (halfClosed) {
          halfClosed.add(out);
          if (halfClosed.size() >= numEndedTogether) {
            halfClosed.forEach(StreamObserver::onCompleted);
            halfClosed.clear();
          }
        }
      }
    };
  }

  @Override
  public void close() {
    server.shutdownNow();
  }

  /** A status as the real server makes it. */
  static com.google.rpc.Status status(Status.Code code, String reason, Message... details) {
    var info = ErrorInfo.newBuilder().setDomain("vorrang").setReason(reason).build();
    var status =
        com.google.rpc.Status.newBuilder()
            .setCode(code.value())
            .setMessage("told by a test")
            .addDetails(Any.pack(info));
    for (Message detail : details) {
      status.addDetails(Any.pack(detail));
    }
    return status.build();
  }

  static BadRequest violation(String field, String description) {
    var violation =
        BadRequest.FieldViolation.newBuilder().setField(field).setDescription(description);
    return BadRequest.newBuilder().addFieldViolations(violation).build();
  }

  static RetryInfo retry(long milliseconds) {
    var delay = com.google.protobuf.Duration.newBuilder().setNanos((int) (milliseconds * 1_000_000));
    return RetryInfo.newBuilder().setRetryDelay(delay).build();
  }

  private final class Spy implements ServerInterceptor {
    private static final Metadata.Key<String> AUTHORIZATION =
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    @Override
    public <Q, A> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, A> call, Metadata headers, ServerCallHandler<Q, A> next) {
      authorizations.add(String.valueOf(headers.get(AUTHORIZATION)));
      return next.startCall(call, headers);
    }
  }
}
