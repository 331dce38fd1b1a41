package io.vorrang.client;

import io.vorrang.v1.OpenedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;

/**
 * The state of one session, under one lock: whether it is open, and which stream carries what is to be
 * sent. {@link LiveRequests} are what runs, {@link Session} is what callers see.
 *
 * <p>Invariant: no code of a caller's runs under the lock, and no thread that reads the network waits
 * for one; what may run such code is left to {@link Guard#later} and {@link Guard#tell}.
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

  private final Guard guard;
  // All below is used under the guard's lock alone.
  private final Outbox outbox = new Outbox();
  private final LiveRequests requests;
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
    guard = new Guard(transport::execute);
    requests = new LiveRequests(guard, outbox);
    reconnection = new Reconnection(options.reconnectTimeout());
  }

  // What the session asks for.

  /** Opens the stream and waits for the server's answer. */
  void open() {
    guard.enter();
    try {
      if (state == State.OPENING) { // the client may have been closed meanwhile
        openLink(options.resumeToken());
      }
      long leftNanos = options.openTimeout().toNanos();
      while (state == State.OPENING && leftNanos > 0) {
        leftNanos = guard.await(leftNanos);
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
      guard.leave();
    }
  }

  SessionInfo info() {
    return guard.read(() -> info);
  }

  int numAlive() {
    return guard.read(() -> requests.size());
  }

  boolean isOpen() {
    return guard.read(() -> state != State.CLOSED && !outbox.closing());
  }

  boolean isConnected() {
    return guard.read(() -> state == State.OPEN);
  }

  CompletableFuture<Duration> goingAway() {
    return goingAway.copy();
  }

  /** Begins a request with its first frame; waits while the transport takes nothing more. */
  void begin(GenerationStream stream, SessionRequest frame) {
    guard.run(
        () -> {
          checkOpen();
          awaitRoom();
          requests.add(stream);
          send(frame);
          outbox.addCredit(stream);
          pump();
        });
  }

  void halfClose() {
    guard.run(
        () -> {
          outbox.close();
          pump();
        });
  }

  void close() {
    guard.enter();
    try {
      if (state == State.OPEN && !outbox.closing()) {
        for (GenerationStream stream : requests.all()) {
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
        leftNanos = guard.await(leftNanos);
      }
    } catch (InterruptedException interruption) {
      Thread.currentThread().interrupt();
    } finally {
      end(ConnectionLostException.because("the session was closed"));
      guard.leave();
    }
  }

  // What streams ask for.

  void cancel(GenerationStream stream) {
    guard.run(
        () -> {
          if (requests.has(stream) && !stream.cancelled) {
            checkOpen();
            stream.cancelled = true;
            send(Frames.cancel(stream.requestId()));
          }
        });
  }

  void pause(GenerationStream stream, boolean paused) {
    guard.run(
        () -> {
          if (requests.has(stream)) {
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
    guard.enter();
    try {
      checkOpen();
      awaitRoom();
      requests.addChange(stream, priority, answer);
      send(Frames.reprioritize(stream.requestId(), priority));
    } catch (VorrangException refused) {
      answer.completeExceptionally(refused);
    } finally {
      guard.leave();
    }
    return answer;
  }

  long consumedSequence(GenerationStream stream) {
    return guard.read(() -> stream.consumedSequence);
  }

  void consumed(GenerationStream stream, EventStream.Slot slot) {
    guard.run(
        () -> {
          stream.consumedSequence = slot.sequence();
          if (slot.event() instanceof Event.Delta delta) {
            int tokens = delta.tokenIds().size();
            stream.waitingTokens -= tokens;
            stream.outstandingTokens -= tokens;
            if (requests.has(stream)) {
              outbox.addCredit(stream);
              pump();
            }
          }
        });
  }

  // All below runs under the lock.

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
        guard.await();
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
      guard.changed(); // there may be room for who waits
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
      case COMMAND_REJECTED -> {
        var rejected = frame.getCommandRejected();
        if (rejected.getCommand().equals("open")) {
          onOpenRejected(Errors.ofCommand(rejected));
        } else {
          requests.onRejected(frame.getRequestId(), rejected);
        }
      }
      case GO_AWAY -> {
        Duration left = Wire.duration(frame.getGoAway().getTimeLeft());
        isGoingAway = true;
        guard.tell(() -> goingAway.complete(left));
      }
      default -> requests.onEvent(frame);
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
      outbox.addFirst(requests.takeUp());
    }
    pump();
    guard.changed();
  }

  private void onOpenRejected(VorrangException error) {
    if (state != State.LOST || error.reason() != Reason.RESUME_OUT_OF_RANGE) {
      end(error);
      return;
    }
    requests.endBegun(error);
    link.send(Frames.open(options, ""));
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
      reconnection.begin();
      transport.later(this::giveUp, options.reconnectTimeout());
      guard.changed();
    }
    transport.later(this::reconnect, reconnection.nextDelay());
  }

  private boolean canReconnect(VorrangException why) {
    boolean isNeeded = !requests.isEmpty() || !outbox.closing();
    boolean isPossible = requests.isEmpty() || !info.token().isEmpty();
    return isNeeded && isPossible && !isGoingAway && reconnection.isWorthwhile(why);
  }

  private void reconnect() {
    guard.run(
        () -> {
          if (state == State.LOST && link == null) {
            transport.resetConnectBackoff();
            // Without requests there is nothing to take up, and the server has forgotten the session.
            openLink(requests.isEmpty() ? "" : info.token());
          }
        });
  }

  private void giveUp() {
    guard.run(
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
    requests.endAll(why);
    transport.forget(session);
    guard.changed();
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
      guard.run(
          () -> {
            if (from == link) {
              work.run();
            }
          });
    }
  }
}
