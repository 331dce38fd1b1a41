package io.vorrang.client;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Executor;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.Supplier;

/**
 * The one lock of a session. What must not be done under it waits until it is released: {@link #leave}
 * does it then, on the thread that leaves.
 */
final class Guard {
  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  private final List<Runnable> afterwards = new ArrayList<>(); // guarded by the lock
  private final Executor executor;

  /** A guard whose {@link #tell} uses an executor. */
  Guard(Executor executor) {
    this.executor = executor;
  }

  /** Takes the lock; {@link #leave} must follow. */
  void enter() {
    lock.lock();
  }

  /** Releases the lock and does what waited for that. */
  void leave() {
    List<Runnable> work = lock.getHoldCount() == 1 ? List.copyOf(afterwards) : List.of();
    if (!work.isEmpty()) {
      afterwards.clear();
    }
    lock.unlock();
    work.forEach(Runnable::run);
  }

  /** Does something under the lock. */
  void run(Runnable work) {
    enter();
    try {
      work.run();
    } finally {
      leave();
    }
  }

  /** A value as it is under the lock. */
  <T> T read(Supplier<T> value) {
    enter();
    try {
      return value.get();
    } finally {
      leave();
    }
  }

  // All below is for who holds the lock.

  /** Has something done once the lock is released. */
  void later(Runnable work) {
    afterwards.add(work);
  }

  /** Has what may run code of the caller's run on the executor. */
  void tell(Runnable work) {
    later(() -> executor.execute(work));
  }

  /** Lets those who wait look again. */
  void changed() {
    changed.signalAll();
  }

  /** Waits for a change, without the lock. */
  void await() throws InterruptedException {
    changed.await();
  }

  /** As {@link #await()}, for so long at most; what is left of it. */
  long await(long nanos) throws InterruptedException {
    return changed.awaitNanos(nanos);
  }
}
