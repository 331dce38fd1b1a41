package io.vorrang.client;

import io.grpc.Status;

/** The server can't be reached, or the stream broke before the request had ended. */
public final class ConnectionLostException extends VorrangException {
  ConnectionLostException(Failure failure, Throwable cause) {
    super(failure, cause);
  }

  @Override
  ConnectionLostException again() {
    return new ConnectionLostException(failure(), this);
  }

  static ConnectionLostException because(String message) {
    return new ConnectionLostException(
        Failure.of(message, Status.Code.UNAVAILABLE, Reason.NONE, true), null);
  }
}
