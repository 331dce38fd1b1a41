package io.vorrang.client;

import io.grpc.Status;
import io.vorrang.client.VorrangException.Failure;
import io.vorrang.v1.CommandRejectedEvent;
import io.vorrang.v1.SessionRequest;
import io.vorrang.v1.SessionResponse;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/**
 * The requests of a session that have not ended: gives each what arrives for it, and says what a new
 * stream has to begin with. Knows no stream. Used under the session's lock alone.
 */
final class LiveRequests {
  private final Guard guard;
  private final Outbox outbox;
  private final PriorityChanges changes;
  private final Map<String, GenerationStream> streams = new LinkedHashMap<>();

  LiveRequests(Guard guard, Outbox outbox) {
    this.guard = guard;
    this.outbox = outbox;
    changes = new PriorityChanges(guard::tell);
  }

  int size() {
    return streams.size();
  }

  boolean isEmpty() {
    return streams.isEmpty();
  }

  /** A copy, so that requests may end meanwhile. */
  List<GenerationStream> all() {
    return List.copyOf(streams.values());
  }

  boolean has(GenerationStream stream) {
    return streams.get(stream.requestId()) == stream;
  }

  /**
   * Takes in a request.
   *
   * @throws VorrangException one of that id is alive
   */
  void add(GenerationStream stream) {
    if (streams.putIfAbsent(stream.requestId(), stream) != null) {
      String message = "request \"" + stream.requestId() + "\" is alive in this session";
      throw new VorrangException(
          Failure.of(message, Status.Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST_ID, false), null);
    }
  }

  /**
   * A change of priority that is about to be sent.
   *
   * @throws VorrangException the request has ended
   */
  void addChange(
      GenerationStream stream, Priority priority, CompletableFuture<Event.PriorityChanged> answer) {
    if (!has(stream)) {
      throw hasEnded(stream.requestId());
    }
    changes.add(stream.requestId(), priority, answer);
  }

  void onEvent(SessionResponse frame) {
    GenerationStream stream = streams.get(frame.getRequestId());
    if (stream == null || frame.getSequence() <= stream.lastSequence) {
      return; // it has ended here, or this was seen before the connection was lost
    }
    stream.lastSequence = frame.getSequence();
    if (frame.hasFailed()) {
      end(frame.getRequestId(), Errors.ofRequest(frame.getFailed()));
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
    guard.later(stream::deliver);
  }

  /** A command about a request was not obeyed. */
  void onRejected(String requestId, CommandRejectedEvent rejected) {
    var error = Errors.ofCommand(rejected);
    switch (rejected.getCommand()) {
      case "start" -> {
        GenerationStream stream = streams.get(requestId);
        if (stream != null && stream.lastSequence == 0) {
          end(requestId, Errors.ofStart(rejected));
        }
      }
      case "resume" -> {
        if (error.reason() != Reason.SESSION_STATE) { // that one says it is here already
          end(requestId, Errors.ofStart(rejected));
        }
      }
      case "reprioritize" ->
          changes.rejected(requestId, error, streams.containsKey(requestId));
      default -> {} // Cancelling, pausing or granting what has just ended is no error.
    }
  }

  /** What a new stream begins with to go on with all that the lost one carried. */
  List<SessionRequest> takeUp() {
    var frames = new ArrayList<SessionRequest>();
    for (GenerationStream stream : streams.values()) {
      // A start that may or may not have arrived is harmless to repeat: equal ones mean one request.
      frames.add(
          hasBegun(stream)
              ? Frames.resume(stream.requestId(), stream.lastSequence)
              : stream.startFrame);
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
    frames.addAll(changes.repeat());
    return frames;
  }

  /** The server no longer has what it had accepted. What it never saw can still be started. */
  void endBegun(VorrangException why) {
    for (GenerationStream stream : all()) {
      if (hasBegun(stream)) {
        end(stream.requestId(), why);
      }
    }
  }

  void endAll(VorrangException why) {
    changes.failAll(why);
    List.copyOf(streams.keySet()).forEach(id -> end(id, why));
  }

  private static boolean hasBegun(GenerationStream stream) {
    return stream.lastSequence > 0 || stream.startFrame == null;
  }

  private void end(String requestId, VorrangException failure) {
    GenerationStream stream = forget(requestId);
    if (stream != null) {
      stream.fail(failure);
      guard.later(stream::deliver);
    }
  }

  private GenerationStream forget(String requestId) {
    GenerationStream stream = streams.remove(requestId);
    outbox.dropCredit(stream);
    changes.failAll(requestId, hasEnded(requestId));
    return stream;
  }

  private static VorrangException hasEnded(String requestId) {
    String message = "request \"" + requestId + "\" has ended";
    return new VorrangException(
        Failure.of(message, Status.Code.NOT_FOUND, Reason.UNKNOWN_REQUEST, false), null);
  }
}
