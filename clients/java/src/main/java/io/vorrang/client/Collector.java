package io.vorrang.client;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;

/** Puts the events of one request together to a {@link Result}. For one thread at a time. */
final class Collector implements Flow.Subscriber<Event> {
  /** An output as far as it has come. */
  private static final class Part {
    private final StringBuilder text = new StringBuilder();
    private final List<Integer> tokenIds = new ArrayList<>();
    private final List<Event.PositionLogprobs> logprobs = new ArrayList<>();
    private Event.Finished finished;

    private Output output(Event.Finished otherwise) {
      return new Output(
          text.toString(),
          List.copyOf(tokenIds),
          List.copyOf(logprobs),
          finished == null ? otherwise : finished);
    }
  }

  private final CompletableFuture<Result> future;
  private final List<Part> parts = new ArrayList<>();
  private final List<Event.PositionLogprobs> promptLogprobs = new ArrayList<>();
  private Event.Accepted accepted;
  private Event.Finished finished;

  Collector() {
    this(new CompletableFuture<>());
  }

  /** As a subscriber it completes the future. */
  Collector(CompletableFuture<Result> future) {
    this.future = future;
  }

  void add(Event event) {
    if (event instanceof Event.Delta delta) {
      var part = part(delta.outputIndex());
      part.text.append(delta.text());
      part.tokenIds.addAll(delta.tokenIds());
      part.logprobs.addAll(delta.logprobs());
    } else if (event instanceof Event.OutputFinished end) {
      part(end.outputIndex()).finished = end.finished();
    } else if (event instanceof Event.PromptLogprobs scored) {
      promptLogprobs.addAll(scored.positions());
    } else if (event instanceof Event.Accepted first) {
      accepted = first;
    } else if (event instanceof Event.Finished last) {
      finished = last;
    }
  }

  /**
   * Everything that was added.
   *
   * @throws ConnectionLostException the end was not among it
   */
  Result result() {
    if (finished == null) {
      throw ConnectionLostException.because("the stream was closed before the request had ended");
    }
    part(0); // there is one, even if nothing was produced
    var outputs = parts.stream().map(part -> part.output(finished)).toList();
    return new Result(outputs, List.copyOf(promptLogprobs), accepted, finished);
  }

  private Part part(int outputIndex) {
    while (parts.size() <= outputIndex) {
      parts.add(new Part());
    }
    return parts.get(outputIndex);
  }

  @Override
  public void onSubscribe(Flow.Subscription subscription) {
    subscription.request(Long.MAX_VALUE);
  }

  @Override
  public void onNext(Event event) {
    add(event);
  }

  @Override
  public void onError(Throwable error) {
    future.completeExceptionally(error);
  }

  @Override
  public void onComplete() {
    future.complete(result());
  }
}
