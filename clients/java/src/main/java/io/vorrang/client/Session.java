package io.vorrang.client;

import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
/**
 * Many requests on one stream, and live control of them. Thread-safe.
 *
 * <p>When the connection is lost the session opens a stream anew and takes its requests up where they
 * stopped, as long as the server keeps them and {@link SessionOptions.Builder#reconnectTimeout} allows;
 * after that they fail with {@link ConnectionLostException}.
 *
 * <p>Closing cancels what still runs. To let it run to its end instead, read the streams to their ends
 * first, or {@link #halfClose} and then read them.
 */
public final class Session implements AutoCloseable {
  private final Transport transport;
  private final SessionOptions options;
  private final SessionCore core;

  Session(Transport transport, SessionOptions options) {
    this.transport = transport;
    this.options = options;
    core = new SessionCore(transport, options, this);
  }

  /** Opens the stream and waits for the server's answer. */
  void open() {
    core.open();
  }

  /** What the server said when the session was opened; after a reconnection, what it said then. */
  public SessionInfo info() {
    return core.info();
  }

  /** Number of requests that have not ended. */
  public int alive() {
    return core.numAlive();
  }

  /** Whether requests can be started: neither closed by anybody nor lost for good. */
  public boolean isOpen() {
    return core.isOpen();
  }

  /** Whether the stream is there; false while it is looked for again. */
  boolean isConnected() {
    return core.isConnected();
  }

  /**
   * Completed when the server announces its end, with the time it gives to what runs. Start requests
   * on another session then; those of this one go on until they end or the time is over.
   */
  public CompletableFuture<Duration> goingAway() {
    return core.goingAway();
  }

  /**
   * Starts a request. Returns at once, except while the transport takes nothing more; whether the
   * server takes the request shows in the stream's events. What is read before a subscriber or
   * iterator is there waits in the stream.
   *
   * @throws VorrangException the session is closed or lost ({@link ConnectionLostException}), a request
   *     of that id is alive in it, or the thread was interrupted
   */
  public GenerationStream start(Request request) {
    String id = request.id().isEmpty() ? UUID.randomUUID().toString() : request.id();
    int windowTokens = request.creditTokens().orElse(options.windowTokens());
    var frame = Frames.start(id, request, windowTokens);
    var stream = new GenerationStream(core, id, frame, windowTokens, 0, transport.executor());
    stream.outstandingTokens = windowTokens;
    core.begin(stream, frame);
    return stream;
  }

  /**
   * Takes up a request of the earlier session whose token this one was opened with: its events after
   * {@code afterSequence} come again. A refusal is the stream's failure, with {@link
   * Reason#RESUME_OUT_OF_RANGE} when they are no longer held.
   *
   * @param requestId id of the request
   * @param afterSequence of the last event that was kept; 0 = none
   * @throws VorrangException as for {@link #start}
   */
  public GenerationStream resume(String requestId, long afterSequence) {
    var frame = Frames.resume(requestId, afterSequence);
    // What it was granted at its start is not known here, so it counts as nothing: at worst its first
    // window is that much larger.
    var stream =
        new GenerationStream(
            core, requestId, null, options.windowTokens(), afterSequence, transport.executor());
    core.begin(stream, frame);
    return stream;
  }

  /**
   * Ends the sending side: no more commands. Requests already started run to their end, and since
   * nothing more can be granted the server sends them as fast as they are computed.
   */
  public void halfClose() {
    core.halfClose();
  }

  /**
   * Cancels what still runs, and waits until the server has ended it, {@link
   * SessionOptions.Builder#closeTimeout} at most. Harmless when the session is closed.
   */
  @Override
  public void close() {
    core.close();
  }
}
