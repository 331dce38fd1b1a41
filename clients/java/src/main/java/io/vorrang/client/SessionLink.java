package io.vorrang.client;

import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.vorrang.v1.GenerationServiceGrpc.GenerationServiceStub;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;

/**
 * One gRPC stream of a session. Not thread-safe, like what it wraps: its owner calls every method under
 * one lock. It calls its owner from gRPC's threads, one at a time, never from within such a method.
 */
final class SessionLink implements ClientResponseObserver<SessionRequest, SessionResponse> {
  /** Who uses it. */
  interface Owner {
    void onFrame(SessionLink link, SessionResponse frame);

    void onWritable(SessionLink link);

    /** It is over; {@code error} is null when the server ended it well. */
    void onEnd(SessionLink link, Throwable error);
  }

  private final Owner owner;
  private ClientCallStreamObserver<SessionRequest> call;
  private boolean halfClosed;

  SessionLink(Owner owner) {
    this.owner = owner;
  }

  void start(GenerationServiceStub stub) {
    stub.session(this);
  }

  /** Whether the transport takes more without buffering it. */
  boolean isReady() {
    return !halfClosed && call.isReady();
  }

  void send(SessionRequest frame) {
    call.onNext(frame);
  }

  void halfClose() {
    if (!halfClosed) {
      halfClosed = true;
      call.onCompleted();
    }
  }

  void cancel(String why) {
    call.cancel(why, null);
  }

  @Override
  public void beforeStart(ClientCallStreamObserver<SessionRequest> call) {
    this.call = call;
    call.setOnReadyHandler(() -> owner.onWritable(this));
  }

  @Override
  public void onNext(SessionResponse frame) {
    owner.onFrame(this, frame);
  }

  @Override
  public void onError(Throwable error) {
    owner.onEnd(this, error);
  }

  @Override
  public void onCompleted() {
    owner.onEnd(this, null);
  }
}
