package io.vorrang.client;

import io.grpc.Status;
import io.vorrang.client.VorrangException.Failure;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.OpenedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

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
  private enum State {
    OPENING,
    OPEN,
    /** The stream broke; another one is being opened. */
    LOST,
    CLOSED
  }

  private static final int OUTBOX_FRAMES_MAX = 256;
  private static final Duration BACKOFF_FIRST = Duration.ofMillis(50);
  private static final Duration BACKOFF_MAX = Duration.ofSeconds(1);

  /** Codes of a broken connection, when no reason of the server's comes with them. */
  private static final Set<Status.Code> BROKEN =
      Set.of(
          Status.Code.UNAVAILABLE, Status.Code.INTERNAL, Status.Code.UNKNOWN, Status.Code.CANCELLED);

  private final Transport transport;
  private final SessionOptions options;
  private final CompletableFuture<Duration> goingAway = new CompletableFuture<>();
  private final Events events = new Events();

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  // All below is guarded by the lock. What must not run under it waits in `afterwards`.
  private final List<Runnable> afterwards = new ArrayList<>();
  private final Map<String, GenerationStream> streams = new LinkedHashMap<>();
  private final PriorityChanges changes = new PriorityChanges(this::tell);
  private final ArrayDeque<SessionRequest> outbox = new ArrayDeque<>();
  private final Set<GenerationStream> creditDue = new LinkedHashSet<>();
  private State state = State.OPENING;
  private SessionLink link;
  private SessionInfo info;
  private VorrangException loss;
  private boolean halfClosed;
  private boolean isGoingAway;
  private long giveUpAtNanos;
  private Duration backoff = BACKOFF_FIRST;

  Session(Transport transport, SessionOptions options) {
    this.transport = transport;
    this.options = options;
  }

  /** Opens the stream and waits for the server's answer. */
  void open() {
    lock.lock();
    try {
      openLink(options.resumeToken());
      long leftNanos = options.openTimeout().toNanos();
      while (state == State.OPENING && leftNanos > 0) {
        leftNanos = changed.awaitNanos(leftNanos);
      }
      if (state == State.OPENING) {
        end(ConnectionLostException.because("no answer to open within " + options.openTimeout()));
      }
      if (state == State.CLOSED) {
        throw loss.again();
      }
    } catch (InterruptedException interruption) {
      end(ConnectionLostException.because("the opening was interrupted"));
      throw VorrangException.interrupted();
    } finally {
      unlock();
    }
  }

  /** What the server said when the session was opened; after a reconnection, what it said then. */
  public SessionInfo info() {
    lock.lock();
    try {
      return info;
    } finally {
      unlock();
    }
  }

  /** Number of requests that have not ended. */
  public int alive() {
    lock.lock();
    try {
      return streams.size();
    } finally {
      unlock();
    }
  }

  /** Whether requests can be started: neither closed by anybody nor lost for good. */
  public boolean isOpen() {
    lock.lock();
    try {
      return state != State.CLOSED && !halfClosed;
    } finally {
      unlock();
    }
  }

  /**
   * Completed when the server announces its end, with the time it gives to what runs. Start requests
   * on another session then; those of this one go on until they end or the time is over.
   */
  public CompletableFuture<Duration> goingAway() {
    return goingAway.copy();
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
    var stream = new GenerationStream(this, id, frame, windowTokens, 0, transport.executor());
    stream.outstandingTokens = windowTokens;
    return begin(stream, frame);
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
            this, requestId, null, options.windowTokens(), afterSequence, transport.executor());
    return begin(stream, frame);
  }

  /**
   * Ends the sending side: no more commands. Requests already started run to their end, and since
   * nothing more can be granted the server sends them as fast as they are computed.
   */
  public void halfClose() {
    lock.lock();
    try {
      halfClosed = true;
      creditDue.clear();
      pump();
    } finally {
      unlock();
    }
  }

  /**
   * Cancels what still runs, and waits until the server has ended it, {@link
   * SessionOptions.Builder#closeTimeout} at most. Harmless when the session is closed.
   */
  @Override
  public void close() {
    lock.lock();
    try {
      if (state == State.OPEN && !halfClosed) {
        for (GenerationStream stream : streams.values()) {
          if (!stream.cancelled) {
            stream.cancelled = true;
            outbox.add(Frames.cancel(stream.requestId()));
          }
        }
        halfClosed = true;
        creditDue.clear();
        pump();
      }
      long leftNanos = options.closeTimeout().toNanos();
      while (state == State.OPEN && leftNanos > 0) {
        leftNanos = changed.awaitNanos(leftNanos);
      }
    } catch (InterruptedException interruption) {
      Thread.currentThread().interrupt();
    } finally {
      end(ConnectionLostException.because("the session was closed"));
      unlock();
    }
  }

  // What streams ask for.

  void cancel(GenerationStream stream) {
    lock.lock();
    try {
      if (streams.get(stream.requestId()) == stream && !stream.cancelled) {
        checkOpen();
        stream.cancelled = true;
        send(Frames.cancel(stream.requestId()));
      }
    } finally {
      unlock();
    }
  }

  void pause(GenerationStream stream, boolean paused) {
    lock.lock();
    try {
      if (streams.get(stream.requestId()) == stream) {
        checkOpen();
        stream.paused = paused;
        stream.pauseWasSaid = true;
        awaitRoom();
        send(Frames.pause(stream.requestId(), stream.paused));
      }
    } finally {
      unlock();
    }
  }

  CompletableFuture<Event.PriorityChanged> reprioritize(GenerationStream stream, Priority priority) {
    var answer = new CompletableFuture<Event.PriorityChanged>();
    lock.lock();
    try {
      checkOpen();
      awaitRoom();
      if (streams.get(stream.requestId()) != stream) {
        throw hasEnded(stream.requestId());
      }
      changes.add(stream.requestId(), answer);
      var frame = Frames.reprioritize(stream.requestId(), priority);
      if (state == State.LOST) {
        outbox.add(frame); // after what the new stream begins with
      } else {
        send(frame);
      }
    } catch (VorrangException refused) {
      answer.completeExceptionally(refused);
    } finally {
      unlock();
    }
    return answer;
  }

  long consumedSequence(GenerationStream stream) {
    lock.lock();
    try {
      return stream.consumedSequence;
    } finally {
      unlock();
    }
  }

  void consumed(GenerationStream stream, EventStream.Slot slot) {
    lock.lock();
    try {
      stream.consumedSequence = slot.sequence();
      if (slot.event() instanceof Event.Delta delta) {
        int tokens = delta.tokenIds().size();
        stream.waitingTokens -= tokens;
        stream.outstandingTokens -= tokens;
        if (!halfClosed && stream.wantsCredit() && streams.get(stream.requestId()) == stream) {
          creditDue.add(stream);
          pump();
        }
      }
    } finally {
      unlock();
    }
  }

  // All below runs under the lock.

  /** Releases the lock and does what must not be done under it. */
  private void unlock() {
    List<Runnable> work = lock.getHoldCount() == 1 ? List.copyOf(afterwards) : List.of();
    if (!work.isEmpty()) {
      afterwards.clear();
    }
    lock.unlock();
    work.forEach(Runnable::run);
  }

  private GenerationStream begin(GenerationStream stream, SessionRequest frame) {
    lock.lock();
    try {
      checkOpen();
      awaitRoom();
      if (streams.putIfAbsent(stream.requestId(), stream) != null) {
        String message = "request \"" + stream.requestId() + "\" is alive in this session";
        throw new VorrangException(
            Failure.of(message, Status.Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID, false),
            null);
      }
      send(frame);
      if (stream.wantsCredit()) {
        creditDue.add(stream);
        pump();
      }
      return stream;
    } finally {
      unlock();
    }
  }

  private void checkOpen() {
    if (state == State.CLOSED) {
      throw loss.again();
    }
    if (halfClosed) {
      throw VorrangException.sessionState("the session is half-closed");
    }
  }

  /** Waits while the transport takes nothing more and enough waits for it. */
  private void awaitRoom() {
    try {
      while (state == State.OPEN && outbox.size() >= OUTBOX_FRAMES_MAX) {
        changed.await();
      }
    } catch (InterruptedException interruption) {
      throw VorrangException.interrupted();
    }
    checkOpen();
  }

  /** Sends a frame in its turn; while the stream is lost, the next one begins with what it says. */
  private void send(SessionRequest frame) {
    if (state == State.OPEN) {
      outbox.add(frame);
      pump();
    }
  }

  /** Gives the transport what it takes: commands first, then credit. */
  private void pump() {
    if (state != State.OPEN) {
      return;
    }
    while (link.isReady()) {
      SessionRequest frame = outbox.isEmpty() ? nextCredit() : outbox.poll();
      if (frame == null) {
        break;
      }
      link.send(frame);
    }
    if (halfClosed && outbox.isEmpty()) {
      link.halfClose();
    }
    changed.signalAll();
  }

  private SessionRequest nextCredit() {
    var next = creditDue.iterator();
    if (!next.hasNext()) {
      return null;
    }
    GenerationStream stream = next.next();
    next.remove();
    int tokens = stream.windowTokens - stream.outstandingTokens;
    stream.outstandingTokens = stream.windowTokens;
    return Frames.credit(stream.requestId(), tokens, stream.consumedSequence);
  }

  private void openLink(String resumeToken) {
    link = new SessionLink(events);
    link.start(transport.stub());
    link.send(Frames.open(options, resumeToken));
  }

  private void onOpened(OpenedEvent opened) {
    info =
        new SessionInfo(
            opened.getSessionToken(),
            opened.getLimits(),
            opened.getDefaultLevel(),
            opened.getPolicy(),
            opened.getServerVersion());
    boolean again = state == State.LOST;
    state = State.OPEN;
    backoff = BACKOFF_FIRST;
    if (again) {
      takeUpAll();
    }
    pump();
    changed.signalAll();
  }

  /** Begins a new stream with all that the lost one carried. */
  private void takeUpAll() {
    var frames = new ArrayList<SessionRequest>();
    for (GenerationStream stream : streams.values()) {
      boolean isKnown = stream.lastSequence > 0 || stream.startFrame == null;
      // A start that may or may not have arrived is harmless to repeat: equal ones mean one request.
      frames.add(isKnown ? Frames.resume(stream.requestId(), stream.lastSequence) : stream.startFrame);
      // The server counts what was granted at the start anew, from the event it goes on with.
      int granted = stream.startFrame == null ? 0 : stream.windowTokens;
      stream.outstandingTokens = stream.waitingTokens + granted;
      if (stream.pauseWasSaid) {
        frames.add(Frames.pause(stream.requestId(), stream.paused));
      }
      if (stream.cancelled) {
        frames.add(Frames.cancel(stream.requestId()));
      }
      if (!halfClosed && stream.wantsCredit()) {
        creditDue.add(stream);
      }
    }
    for (int i = frames.size() - 1; i >= 0; i--) {
      outbox.addFirst(frames.get(i));
    }
  }

  private void onRejected(String requestId, CommandRejectedEvent rejected) {
    var error = Errors.ofCommand(rejected);
    switch (rejected.getCommand()) {
      case "open" -> onOpenRejected(error);
      case "start" -> {
        GenerationStream stream = streams.get(requestId);
        if (stream != null && stream.lastSequence == 0) {
          endStream(requestId, Errors.ofStart(rejected));
        }
      }
      case "resume" -> {
        if (error.reason() != Reason.SESSION_STATE) { // that one says it is here already
          endStream(requestId, Errors.ofStart(rejected));
        }
      }
      case "reprioritize" -> changes.rejected(requestId, error);
      default -> {} // Cancelling, pausing or granting what has just ended is no error.
    }
  }

  private void onOpenRejected(VorrangException error) {
    if (state != State.LOST || error.reason() != Reason.RESUME_OUT_OF_RANGE) {
      end(error);
      return;
    }
    // The server no longer has what it had accepted. What it never saw can still be started.
    for (GenerationStream stream : List.copyOf(streams.values())) {
      if (stream.lastSequence > 0 || stream.startFrame == null) {
        endStream(stream.requestId(), error);
      }
    }
    link.send(Frames.open(options, ""));
  }

  private void onEvent(SessionResponse frame) {
    GenerationStream stream = streams.get(frame.getRequestId());
    if (stream == null || frame.getSequence() <= stream.lastSequence) {
      return; // it has ended here, or this was seen before the connection was lost
    }
    stream.lastSequence = frame.getSequence();
    if (frame.hasFailed()) {
      endStream(frame.getRequestId(), Errors.ofRequest(frame.getFailed()));
      return;
    }
    Event event = Wire.event(frame).orElse(null);
    if (event == null) {
      return;
    }
    if (event instanceof Event.Delta delta) {
      stream.waitingTokens += delta.tokenIds().size();
    } else if (event instanceof Event.PriorityChanged change) {
      changes.answered(frame.getRequestId(), change);
    } else if (event instanceof Event.Finished) {
      forget(frame.getRequestId());
    }
    stream.offer(frame.getSequence(), event);
    afterwards.add(stream::deliver);
  }

  private void endStream(String requestId, VorrangException failure) {
    GenerationStream stream = forget(requestId);
    if (stream != null) {
      stream.fail(failure);
      afterwards.add(stream::deliver);
    }
  }

  private GenerationStream forget(String requestId) {
    GenerationStream stream = streams.remove(requestId);
    creditDue.remove(stream);
    changes.failAll(requestId, hasEnded(requestId));
    return stream;
  }

  /** Has what may run code of the caller's run on the executor. */
  private void tell(Runnable work) {
    afterwards.add(() -> transport.execute(work));
  }

  private void onLinkEnd(Throwable error) {
    link = null;
    VorrangException why =
        error == null
            ? ConnectionLostException.because("the server ended the session")
            : Errors.ofCall(error);
    if (state == State.OPENING || !canReconnect(why)) {
      end(asLoss(why));
      return;
    }
    if (state == State.OPEN) {
      state = State.LOST;
      outbox.clear();
      creditDue.clear();
      // Whether the server obeyed is not known, nor whether its answer will come.
      changes.failAll(why);
      giveUpAtNanos = System.nanoTime() + options.reconnectTimeout().toNanos();
      transport.later(this::giveUp, options.reconnectTimeout());
      changed.signalAll();
    }
    transport.later(this::reconnect, backoff);
    backoff = min(backoff.multipliedBy(2), BACKOFF_MAX);
  }

  private boolean canReconnect(VorrangException why) {
    boolean isWorthIt = !streams.isEmpty() || !halfClosed;
    return isWorthIt
        && why.reason() == Reason.NONE
        && BROKEN.contains(why.code())
        && !isGoingAway
        && !options.reconnectTimeout().isZero()
        && (streams.isEmpty() || !info.token().isEmpty());
  }

  private void reconnect() {
    lock.lock();
    try {
      if (state == State.LOST && link == null) {
        transport.resetConnectBackoff();
        // Without requests there is nothing to take up, and the server has forgotten the session.
        openLink(streams.isEmpty() ? "" : info.token());
      }
    } finally {
      unlock();
    }
  }

  private void giveUp() {
    lock.lock();
    try {
      if (state == State.LOST && System.nanoTime() - giveUpAtNanos >= 0) {
        end(
            ConnectionLostException.because(
                "the connection was lost and not found again within " + options.reconnectTimeout()));
      }
    } finally {
      unlock();
    }
  }

  /** The session is over, for good: tells everybody who waits for something from it. */
  private void end(VorrangException why) {
    if (state == State.CLOSED) {
      return;
    }
    state = State.CLOSED;
    loss = why;
    if (link != null) {
      link.cancel(why.getMessage());
      link = null;
    }
    outbox.clear();
    creditDue.clear();
    List.copyOf(streams.keySet()).forEach(id -> endStream(id, why));
    transport.forget(this);
    changed.signalAll();
  }

  private static VorrangException asLoss(VorrangException why) {
    return why.reason() == Reason.NONE && !(why instanceof ConnectionLostException)
            && BROKEN.contains(why.code())
        ? new ConnectionLostException(why.failure(), why)
        : why;
  }

  private static Duration min(Duration a, Duration b) {
    return a.compareTo(b) < 0 ? a : b;
  }

  private static VorrangException hasEnded(String requestId) {
    String message = "request \"" + requestId + "\" has ended";
    return new VorrangException(
        Failure.of(message, Status.Code.NOT_FOUND, Reason.UNKNOWN_REQUEST, false), null);
  }

  /** What comes from the stream; late words of one that was given up are passed over. */
  private final class Events implements SessionLink.Owner {
    @Override
    public void onFrame(SessionLink from, SessionResponse frame) {
      lock.lock();
      try {
        if (from != link) {
          return;
        }
        switch (frame.getEventCase()) {
          case OPENED -> onOpened(frame.getOpened());
          case COMMAND_REJECTED -> onRejected(frame.getRequestId(), frame.getCommandRejected());
          case GO_AWAY -> {
            Duration left = Wire.duration(frame.getGoAway().getTimeLeft());
            isGoingAway = true;
            tell(() -> goingAway.complete(left));
          }
          default -> onEvent(frame);
        }
      } finally {
        unlock();
      }
    }

    @Override
    public void onWritable(SessionLink from) {
      lock.lock();
      try {
        if (from == link) {
          pump();
        }
      } finally {
        unlock();
      }
    }

    @Override
    public void onEnd(SessionLink from, Throwable error) {
      lock.lock();
      try {
        if (from == link) {
          onLinkEnd(error);
        }
      } finally {
        unlock();
      }
    }
  }
}
