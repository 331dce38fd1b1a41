package io.vorrang.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.Set;

/** When, and for how long, a lost stream is tried again. Knows no stream. Not thread-safe. */
final class Reconnection {
  private static final Duration BACKOFF_FIRST = Duration.ofMillis(50);
  private static final Duration BACKOFF_MAX = Duration.ofSeconds(1);

  /** Codes of a broken connection, when no reason of the server's comes with them. */
  private static final Set<Status.Code> BROKEN =
      Set.of(
          Status.Code.UNAVAILABLE, Status.Code.INTERNAL, Status.Code.UNKNOWN, Status.Code.CANCELLED);

  private final Duration timeout;
  private Duration backoff = BACKOFF_FIRST;
  private long giveUpAtNanos;

  Reconnection(Duration timeout) {
    this.timeout = timeout;
  }

  /** Whether the stream ended because of the connection, and trying again is wanted. */
  boolean isWorthwhile(VorrangException why) {
    return isBroken(why) && !timeout.isZero();
  }

  /** The stream is lost: the time to find it again begins. */
  void begin() {
    backoff = BACKOFF_FIRST;
    giveUpAtNanos = System.nanoTime() + timeout.toNanos();
  }

  /** How long to wait before the next attempt. */
  Duration nextDelay() {
    Duration delay = backoff;
    Duration doubled = backoff.multipliedBy(2);
    backoff = doubled.compareTo(BACKOFF_MAX) < 0 ? doubled : BACKOFF_MAX;
    return delay;
  }

  /** Whether the time is over. */
  boolean isOver() {
    return System.nanoTime() - giveUpAtNanos >= 0;
  }

  /** The end of a session as its requests are told of it. */
  static VorrangException asLoss(VorrangException why) {
    return isBroken(why) && !(why instanceof ConnectionLostException)
        ? new ConnectionLostException(why.failure(), why)
        : why;
  }

  private static boolean isBroken(VorrangException why) {
    return why.reason() == Reason.NONE && BROKEN.contains(why.code());
  }
}
