package io.vorrang.client;

import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * The events of one request, for one reader: a {@link Flow.Subscriber}, or a thread that iterates.
 *
 * <p>A subscriber is called by one thread at a time, never by the threads that read the network, so it
 * may be slow without holding up anybody else. What it has not asked for waits here, and once that is
 * as much as the request's window the server stops computing it.
 *
 * <p>Closing a stream that has not ended cancels its request.
 */
public abstract sealed class EventStream
    implements Flow.Publisher<Event>, Iterable<Event>, AutoCloseable permits GenerationStream, CallStream {
  /** An event that waits, and its sequence on the wire. */
  record Slot(long sequence, Event event) {}

  private enum Reader {
    NONE,
    SUBSCRIBER,
    THREAD,
    GONE
  }

  private final String requestId;
  private final Executor executor;
  private final ReentrantLock lock = new ReentrantLock();
  private final Condition news = lock.newCondition();
  // All below is guarded by the lock. No code of others runs, and no other lock is taken, under it.
  private final ArrayDeque<Slot> waiting = new ArrayDeque<>();
  private boolean ended;
  private VorrangException failure;
  private Reader reader = Reader.NONE;
  private Flow.Subscriber<? super Event> subscriber;
  private long demand;
  private boolean demandIsWrong;
  private boolean delivering;

  EventStream(String requestId, Executor executor) {
    this.requestId = requestId;
    this.executor = executor;
  }

  /** The request's id; empty when the server made it. */
  public final String requestId() {
    return requestId;
  }

  /** Whether the request has ended; events may still wait to be read. */
  public final boolean ended() {
    lock.lock();
    try {
      return ended;
    } finally {
      lock.unlock();
    }
  }

  /**
   * Cancels the request; harmless when it has ended. The events go on to whatever the request came to
   * first, usually {@link Event.Finished} with {@link FinishReason#CANCELLED} in a session and a
   * {@link VorrangException} with {@link Reason#CANCELLED} in a call of its own.
   *
   * @throws VorrangException the session takes no more commands
   */
  public abstract void cancel();

  /** Tells the producer that an event has left for the reader. */
  abstract void consumed(Slot slot);

  /**
   * Reads the events on another thread.
   *
   * <p>Cancelling the subscription cancels the request, and so does a subscriber that throws; what it
   * threw is given to its {@code onError}. A failure is given to {@code onError} as a
   * {@link VorrangException} once all that arrived before it was read.
   */
  @Override
  public final void subscribe(Flow.Subscriber<? super Event> subscriber) {
    Objects.requireNonNull(subscriber);
    boolean first;
    lock.lock();
    try {
      first = reader == Reader.NONE;
      if (first) {
        reader = Reader.SUBSCRIBER;
        this.subscriber = subscriber;
        delivering = true; // nothing is delivered before onSubscribe has returned
      }
    } finally {
      lock.unlock();
    }
    if (first) {
      execute(this::greetAndDeliver);
    } else {
      subscriber.onSubscribe(NOTHING);
      subscriber.onError(new IllegalStateException("the stream has a reader already"));
    }
  }

  /**
   * Reads the events on the calling thread: {@code hasNext} waits for the next one.
   *
   * <p>Both methods of the iterator throw {@link VorrangException} once all that arrived before a
   * failure was read, or when the thread is interrupted; the request then goes on.
   *
   * @throws IllegalStateException the stream has a reader already
   */
  @Override
  public final Iterator<Event> iterator() {
    lock.lock();
    try {
      if (reader != Reader.NONE) {
        throw new IllegalStateException("the stream has a reader already");
      }
      reader = Reader.THREAD;
    } finally {
      lock.unlock();
    }
    return new BlockingIterator();
  }

  /**
   * Waits for the end and returns the whole output.
   *
   * @throws VorrangException the request failed, or the thread was interrupted
   * @throws IllegalStateException the stream has a reader already
   */
  public final Result result() {
    var collector = new Collector();
    for (Event event : this) {
      collector.add(event);
    }
    return collector.result();
  }

  /** The whole output, once it is there; fails with {@link VorrangException}. Takes the stream's one reader. */
  public final CompletableFuture<Result> resultAsync() {
    var result = new CompletableFuture<Result>();
    subscribe(new Collector(result));
    return result;
  }

  /** Waits for the end and returns the text; see {@link #result}. */
  public final String text() {
    return result().text();
  }

  /**
   * Cancels the request if it has not ended, and lets go of what was not read; a subscriber still gets
   * the request's end.
   */
  @Override
  public final void close() {
    boolean isSubscribed;
    lock.lock();
    try {
      isSubscribed = reader == Reader.SUBSCRIBER;
    } finally {
      lock.unlock();
    }
    if (!isSubscribed) {
      leave();
    } else if (!ended()) {
      cancelIfPossible();
    }
  }

  /** Takes in an event; the caller calls {@link #deliver} afterwards, holding no lock. */
  final void offer(long sequence, Event event) {
    lock.lock();
    try {
      if (ended) {
        return;
      }
      ended = event instanceof Event.Finished;
      if (reader == Reader.GONE) {
        return;
      }
      if (event instanceof Event.QueueUpdate && !waiting.isEmpty()
          && waiting.getLast().event() instanceof Event.QueueUpdate) {
        waiting.removeLast(); // only the last place counts, and so what waits stays bounded
      }
      waiting.add(new Slot(sequence, event));
      news.signalAll();
    } finally {
      lock.unlock();
    }
  }

  /** Ends with a failure, unless it has ended; the caller calls {@link #deliver} afterwards. */
  final void fail(VorrangException failure) {
    lock.lock();
    try {
      if (!ended) {
        ended = true;
        this.failure = failure;
        news.signalAll();
      }
    } finally {
      lock.unlock();
    }
  }

  /** Has what waits delivered to the subscriber, if there is one, by a thread of the executor. */
  final void deliver() {
    lock.lock();
    try {
      if (reader != Reader.SUBSCRIBER || delivering) {
        return;
      }
      delivering = true;
    } finally {
      lock.unlock();
    }
    execute(this::deliverAll);
  }

  private void execute(Runnable work) {
    try {
      executor.execute(work);
    } catch (RejectedExecutionException closed) {
      work.run(); // the client is closed: nothing more can arrive, and the end must still be told
    }
  }

  private void greetAndDeliver() {
    try {
      subscriber.onSubscribe(new Demand());
    } catch (Throwable fault) {
      tellEnd(fault);
      return;
    }
    deliverAll();
  }

  /** Invariant: one thread at a time is in here, the one that set {@code delivering}. */
  private void deliverAll() {
    while (true) {
      Slot slot = null;
      Throwable end = null;
      lock.lock();
      try {
        if (reader == Reader.GONE) {
          return;
        } else if (demandIsWrong) {
          end = new IllegalArgumentException("demand must be at least 1");
        } else if (waiting.isEmpty() && ended) {
          reader = Reader.GONE;
          end = failure;
        } else if (waiting.isEmpty() || demand == 0) {
          delivering = false;
          return;
        } else {
          slot = waiting.poll();
          demand -= demand == Long.MAX_VALUE ? 0 : 1;
        }
      } finally {
        lock.unlock();
      }
      if (slot == null) {
        tellEnd(end);
        return;
      }
      try {
        subscriber.onNext(slot.event());
      } catch (Throwable fault) { // errors too: nobody may wait for ever because of one
        tellEnd(fault);
        return;
      }
      consumed(slot);
    }
  }

  private void tellEnd(Throwable end) {
    leave();
    if (end == null) {
      subscriber.onComplete();
    } else {
      subscriber.onError(end instanceof VorrangException failed ? failed.again() : end);
    }
  }

  /** The reader wants no more. */
  private void leave() {
    boolean alive;
    lock.lock();
    try {
      alive = !ended;
      reader = Reader.GONE;
      waiting.clear();
      news.signalAll();
    } finally {
      lock.unlock();
    }
    if (alive) {
      cancelIfPossible();
    }
  }

  private void cancelIfPossible() {
    try {
      cancel();
    } catch (VorrangException closed) {
      return; // a session that is half-closed runs its requests to their end
    }
  }

  private static final Flow.Subscription NOTHING =
      new Flow.Subscription() {
        @Override
        public void request(long n) {}

        @Override
        public void cancel() {}
      };

  private final class Demand implements Flow.Subscription {
    @Override
    public void request(long n) {
      lock.lock();
      try {
        demandIsWrong |= n < 1;
        demand = n > Long.MAX_VALUE - demand ? Long.MAX_VALUE : demand + Math.max(n, 0);
      } finally {
        lock.unlock();
      }
      deliver();
    }

    @Override
    public void cancel() {
      leave();
    }
  }

  private final class BlockingIterator implements Iterator<Event> {
    @Override
    public boolean hasNext() {
      lock.lock();
      try {
        while (waiting.isEmpty() && !ended && reader == Reader.THREAD) {
          news.await();
        }
        if (waiting.isEmpty() && failure != null) {
          throw failure.again();
        }
        return !waiting.isEmpty();
      } catch (InterruptedException interruption) {
        throw VorrangException.interrupted();
      } finally {
        lock.unlock();
      }
    }

    @Override
    public Event next() {
      if (!hasNext()) {
        throw new NoSuchElementException("the request has ended");
      }
      Slot slot;
      lock.lock();
      try {
        slot = waiting.poll();
      } finally {
        lock.unlock();
      }
      if (slot == null) { // it was closed in between
        throw new NoSuchElementException("the stream is closed");
      }
      consumed(slot);
      return slot.event();
    }
  }
}
