package io.vorrang.client;

/** The server did not obey a command; the requests of the session are untouched. */
public final class CommandRejectedException extends VorrangException {
  CommandRejectedException(Failure failure, Throwable cause) {
    super(failure, cause);
  }

  @Override
  CommandRejectedException again() {
    return new CommandRejectedException(failure(), this);
  }
}
