package io.vorrang.client;

import io.vorrang.v1.SessionRequest;
import java.util.ArrayDeque;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;

/**
 * What a session has to send: commands in their order, then credit. Credit is no queue of frames but a
 * set of streams, worked out when the transport takes it, so it takes no more room than there are
 * requests. Not thread-safe.
 */
final class Outbox {
  private static final int FRAMES_MAX = 256;
  private static final long BYTES_MAX = 4 * 1024 * 1024;

  private final ArrayDeque<SessionRequest> frames = new ArrayDeque<>();
  private final Set<GenerationStream> creditDue = new LinkedHashSet<>();
  private long numBytes;
  private boolean closing;

  /** Whether callers need not wait before they add another command. */
  boolean hasRoom() {
    return frames.size() < FRAMES_MAX && numBytes < BYTES_MAX;
  }

  boolean closing() {
    return closing;
  }

  void add(SessionRequest frame) {
    frames.add(frame);
    numBytes += frame.getSerializedSize();
  }

  void addFirst(List<SessionRequest> first) {
    for (int i = first.size() - 1; i >= 0; i--) {
      frames.addFirst(first.get(i));
      numBytes += first.get(i).getSerializedSize();
    }
  }

  /** Has the stream granted what its window lacks, if that is half of it. */
  void addCredit(GenerationStream stream) {
    if (!closing && stream.wantsCredit()) {
      creditDue.add(stream);
    }
  }

  void dropCredit(GenerationStream stream) {
    creditDue.remove(stream);
  }

  /** Nothing more will be added: what is here goes out, and then the sending side ends. */
  void close() {
    closing = true;
    creditDue.clear();
  }

  /** The stream it was meant for is gone. */
  void clear() {
    frames.clear();
    numBytes = 0;
    creditDue.clear();
  }

  /** Gives the transport what it takes. */
  void sendTo(SessionLink link) {
    while (link.isReady()) {
      SessionRequest frame = frames.isEmpty() ? nextCredit() : nextFrame();
      if (frame == null) {
        break;
      }
      link.send(frame);
    }
    if (closing && frames.isEmpty()) {
      link.halfClose();
    }
  }

  private SessionRequest nextFrame() {
    SessionRequest frame = frames.poll();
    numBytes -= frame.getSerializedSize();
    return frame;
  }

  private SessionRequest nextCredit() {
    for (var due = creditDue.iterator(); due.hasNext(); ) {
      GenerationStream stream = due.next();
      due.remove();
      if (stream.wantsCredit()) { // a stream that was taken up again since may have enough
        return stream.grant();
      }
    }
    return null;
  }
}
