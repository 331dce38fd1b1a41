package io.vorrang.client;

import io.grpc.Status;
import io.vorrang.client.VorrangException.Failure;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.OpenedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.Supplier;

/**
 * The state of one session, under one lock: what runs, what is to be sent, and which stream carries it.
 * {@link Session} is what callers see of it.
 *
 * <p>Invariant: no code of a caller's runs under the lock, and no thread that reads the network waits
 * for one. What may run such code waits in {@code afterwards} until the lock is released.
 */
final class SessionCore {
  private enum State {
    OPENING,
    OPEN,
    /** The stream broke; another one is being opened. */
    LOST,
    CLOSED
  }

  private final Transport transport;
  private final SessionOptions options;
  private final Session session;
  private final CompletableFuture<Duration> goingAway = new CompletableFuture<>();
  private final Events events = new Events();

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  // All below is guarded by the lock. What must not run under it waits in `afterwards`.
  private final List<Runnable> afterwards = new ArrayList<>();
  private final Map<String, GenerationStream> streams = new LinkedHashMap<>();
  private final PriorityChanges changes = new PriorityChanges(this::tell);
  private final Outbox outbox = new Outbox();
  private final Reconnection reconnection;
  private State state = State.OPENING;
  private SessionLink link;
  private SessionInfo info;
  private VorrangException loss;
  private boolean isGoingAway;

  SessionCore(Transport transport, SessionOptions options, Session session) {
    this.transport = transport;
    this.options = options;
    this.session = session;
    reconnection = new Reconnection(options.reconnectTimeout());
  }

  // What the session asks for.

  /** Opens the stream and waits for the server's answer. */
  void open() {
    lock.lock();
    try {
      if (state == State.OPENING) { // the client may have been closed meanwhile
        openLink(options.resumeToken());
      }
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

  SessionInfo info() {
    return read(() -> info);
  }

  int numAlive() {
    return read(() -> streams.size());
  }

  boolean isOpen() {
    return read(() -> state != State.CLOSED && !outbox.closing());
  }

  boolean isConnected() {
    return read(() -> state == State.OPEN);
  }

  CompletableFuture<Duration> goingAway() {
    return goingAway.copy();
  }

  /** Begins a request with its first frame; waits while the transport takes nothing more. */
  void begin(GenerationStream stream, SessionRequest frame) {
    run(
        () -> {
          checkOpen();
          awaitRoom();
          if (streams.putIfAbsent(stream.requestId(), stream) != null) {
            String message = "request \"" + stream.requestId() + "\" is alive in this session";
            throw new VorrangException(
                Failure.of(message, Status.Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID, false),
                null);
          }
          send(frame);
          outbox.addCredit(stream);
          pump();
        });
  }

  void halfClose() {
    run(
        () -> {
          outbox.close();
          pump();
        });
  }

  void close() {
    lock.lock();
    try {
      if (state == State.OPEN && !outbox.closing()) {
        for (GenerationStream stream : streams.values()) {
          if (!stream.cancelled) {
            stream.cancelled = true;
            outbox.add(Frames.cancel(stream.requestId()));
          }
        }
        outbox.close();
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
    run(
        () -> {
          if (streams.get(stream.requestId()) == stream && !stream.cancelled) {
            checkOpen();
            stream.cancelled = true;
            send(Frames.cancel(stream.requestId()));
          }
        });
  }

  void pause(GenerationStream stream, boolean paused) {
    run(
        () -> {
          if (streams.get(stream.requestId()) == stream) {
            checkOpen();
            stream.paused = paused;
            stream.pauseWasSaid = true;
            awaitRoom();
            send(Frames.pause(stream.requestId(), stream.paused));
          }
        });
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
      changes.add(stream.requestId(), priority, answer);
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
    return read(() -> stream.consumedSequence);
  }

  void consumed(GenerationStream stream, EventStream.Slot slot) {
    run(
        () -> {
          stream.consumedSequence = slot.sequence();
          if (slot.event() instanceof Event.Delta delta) {
            int tokens = delta.tokenIds().size();
            stream.waitingTokens -= tokens;
            stream.outstandingTokens -= tokens;
            if (streams.get(stream.requestId()) == stream) {
              outbox.addCredit(stream);
              pump();
            }
          }
        });
  }

  private <T> T read(Supplier<T> value) {
    lock.lock();
    try {
      return value.get();
    } finally {
      unlock();
    }
  }

  private void run(Runnable work) {
    lock.lock();
    try {
      work.run();
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

  private void checkOpen() {
    if (state == State.CLOSED) {
      throw loss.again();
    }
    if (outbox.closing()) {
      throw VorrangException.sessionState("the session is half-closed");
    }
  }

  /** Waits while enough waits for the transport, which takes nothing more or is being found again. */
  private void awaitRoom() {
    try {
      while (state != State.CLOSED && !outbox.hasRoom()) {
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

  private void pump() {
    if (state == State.OPEN) {
      outbox.sendTo(link);
      changed.signalAll(); // there may be room for who waits
    }
  }

  private void openLink(String resumeToken) {
    link = new SessionLink(events);
    link.start(transport.stub());
    link.send(Frames.open(options, resumeToken));
  }

  private void onFrame(SessionResponse frame) {
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
      outbox.addCredit(stream);
    }
    outbox.addFirst(frames);
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
    outbox.dropCredit(stream);
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
      end(Reconnection.asLoss(why));
      return;
    }
    if (state == State.OPEN) {
      state = State.LOST;
      outbox.clear();
      // Whether the server obeyed is not known, nor whether its answer will come.
      changes.failAll(why);
      reconnection.begin();
      transport.later(this::giveUp, options.reconnectTimeout());
      changed.signalAll();
    }
    transport.later(this::reconnect, reconnection.nextDelay());
  }

  private boolean canReconnect(VorrangException why) {
    boolean isNeeded = !streams.isEmpty() || !outbox.closing();
    boolean isPossible = streams.isEmpty() || !info.token().isEmpty();
    return isNeeded && isPossible && !isGoingAway && reconnection.isWorthwhile(why);
  }

  private void reconnect() {
    run(
        () -> {
          if (state == State.LOST && link == null) {
            transport.resetConnectBackoff();
            // Without requests there is nothing to take up, and the server has forgotten the session.
            openLink(streams.isEmpty() ? "" : info.token());
          }
        });
  }

  private void giveUp() {
    run(
        () -> {
          if (state == State.LOST && reconnection.isOver()) {
            end(
                ConnectionLostException.because(
                    "the connection was lost and not found again within " + options.reconnectTimeout()));
          }
        });
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
    List.copyOf(streams.keySet()).forEach(id -> endStream(id, why));
    transport.forget(session);
    changed.signalAll();
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
      of(from, () -> SessionCore.this.onFrame(frame));
    }

    @Override
    public void onWritable(SessionLink from) {
      of(from, SessionCore.this::pump);
    }

    @Override
    public void onEnd(SessionLink from, Throwable error) {
      of(from, () -> onLinkEnd(error));
    }

    private void of(SessionLink from, Runnable work) {
      run(
          () -> {
            if (from == link) {
              work.run();
            }
          });
    }
  }
}
