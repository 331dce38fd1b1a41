package io.vorrang.client;

import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.vorrang.v1.GenerateStreamRequest;
import io.vorrang.v1.GenerateStreamResponse;
import io.vorrang.v1.GenerationServiceGrpc.GenerationServiceStub;
import java.util.concurrent.Executor;
import java.util.function.Consumer;

/**
 * A request that is a server-stream call of its own. What its reader has not asked for is held back by
 * the transport's flow control; it can't be reprioritised, paused or resumed.
 */
public final class CallStream extends EventStream {
  /** Messages that may be under way or wait for the reader. */
  private static final int WINDOW_MESSAGES = 32;

  private final Observer observer = new Observer();
  private final Consumer<CallStream> onEnd;
  private volatile boolean cancelled;

  CallStream(String requestId, Executor executor, Consumer<CallStream> onEnd) {
    super(requestId, executor);
    this.onEnd = onEnd;
  }

  void start(GenerationServiceStub stub, GenerateStreamRequest request) {
    stub.generateStream(request, observer);
    if (cancelled) { // by a client that was closed just before there was a call
      cancel();
    }
  }

  @Override
  public void cancel() {
    cancelled = true;
    var call = observer.call;
    if (call != null) {
      call.cancel("the request was cancelled", null); // safe from any thread
    }
  }

  /** The client is closed: the call ends, and its reader is told. */
  void abandon() {
    cancel();
    end(ConnectionLostException.because("the client was closed"));
  }

  private void end(VorrangException failure) {
    fail(failure);
    onEnd.accept(this);
    deliver();
  }

  @Override
  void consumed(Slot slot) {
    observer.call.request(1); // safe from any thread
  }

  private final class Observer
      implements ClientResponseObserver<GenerateStreamRequest, GenerateStreamResponse> {
    private volatile ClientCallStreamObserver<GenerateStreamRequest> call;

    @Override
    public void beforeStart(ClientCallStreamObserver<GenerateStreamRequest> call) {
      this.call = call;
      call.disableAutoRequestWithInitial(WINDOW_MESSAGES);
    }

    @Override
    public void onNext(GenerateStreamResponse frame) {
      var event = Wire.event(frame);
      if (event.isEmpty()) {
        call.request(1); // an event this version does not know takes no place
        return;
      }
      offer(frame.getSequence(), event.get());
      deliver();
    }

    @Override
    public void onError(Throwable error) {
      end(cancelled ? VorrangException.cancelled(error) : Errors.ofCall(error));
    }

    @Override
    public void onCompleted() {
      // Nothing happens when it has finished, as it should.
      end(ConnectionLostException.because("the server ended the call before the request had ended"));
    }
  }
}
