package io.vorrang.examples;

import io.vorrang.client.ConnectionLostException;
import io.vorrang.client.Event;
import io.vorrang.client.GenerationStream;
import io.vorrang.client.Message;
import io.vorrang.client.Output;
import io.vorrang.client.Priority;
import io.vorrang.client.Request;
import io.vorrang.client.Result;
import io.vorrang.client.Session;
import io.vorrang.client.SessionOptions;
import io.vorrang.client.VorrangClient;
import io.vorrang.client.VorrangException;
import java.io.File;
import java.io.IOException;
import java.io.PrintStream;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.function.Consumer;

/** The blocks of docs/clients/java.md stand in these methods, which GuideTest runs. */
public final class Guide {
  private Guide() {}

  public static String answer(String address) {
    try (var client = VorrangClient.builder().target(address).build()) {
      Request request = Request.text("Once upon a time").maxTokens(32).temperature(0).build();
      return client.generate(request, Duration.ofSeconds(30)).text();
    }
  }

  public static Session session(VorrangClient client) {
    return client.openSession(
        SessionOptions.builder()
            .defaultPriority(Priority.STANDARD)
            .reconnectTimeout(Duration.ofSeconds(10))
            .build());
  }

  public static String overtake(Session session, PrintStream out) {
    GenerationStream report =
        session.start(
            Request.text("Once upon a time")
                .priority(Priority.BATCH).maxTokens(400).temperature(0).build());
    GenerationStream question =
        session.start(
            Request.chat(Message.user("What is the capital of France?"))
                .priority(Priority.INTERACTIVE).maxTokens(16).temperature(0).build());
    out.println(question.text());
    Result whole = report.result();
    return whole.finishReason() + " after " + whole.usage().preemptions() + " preemptions";
  }

  public static void events(GenerationStream stream, PrintStream out) {
    for (Event event : stream) {
      if (event instanceof Event.Accepted accepted) {
        out.print("[level " + accepted.level() + "]");
      } else if (event instanceof Event.QueueUpdate update) {
        out.print("[" + update.queuePosition() + " before it]");
      } else if (event instanceof Event.Delta delta) {
        out.print(delta.text());
      } else if (event instanceof Event.Preempted) {
        out.print("[somebody more urgent is served]");
      } else if (event instanceof Event.Finished finished) {
        out.print("[" + finished.reason() + ", " + finished.usage().outputTokens() + " tokens]");
      }
    }
  }

  public static int urgent(GenerationStream stream) {
    CompletableFuture<Event.PriorityChanged> change = stream.reprioritize(Priority.level(-20));
    return change.join().level();
  }

  public static Result cancel(GenerationStream stream) {
    stream.cancel();
    return stream.result(); // what it had produced; its finishReason is CANCELLED
  }

  public static Result deadline(Session session) {
    var request =
        Request.text("Once upon a time")
            .maxTokens(1500)
            .queueTimeout(Duration.ofSeconds(1))
            .totalTimeout(Duration.ofMillis(200))
            .build();
    return session.start(request).result(); // its finishReason is TIME_LIMIT, with what there was
  }

  public static void slowly(Session session, Consumer<String> work) {
    var request =
        Request.text("Once upon a time").creditTokens(16).maxTokens(100).temperature(0).build();
    for (Event event : session.start(request)) {
      if (event instanceof Event.Delta delta) {
        work.accept(delta.text()); // may take its time: at most 16 tokens wait meanwhile
      }
    }
  }

  public static CompletableFuture<Void> subscribe(GenerationStream stream, StringBuilder text) {
    var done = new CompletableFuture<Void>();
    stream.subscribe(
        new Flow.Subscriber<>() {
          private Flow.Subscription subscription;

          @Override
          public void onSubscribe(Flow.Subscription given) {
            subscription = given;
            subscription.request(1);
          }

          @Override
          public void onNext(Event event) {
            if (event instanceof Event.Delta delta) {
              text.append(delta.text());
            }
            subscription.request(1);
          }

          @Override
          public void onError(Throwable failure) {
            done.completeExceptionally(failure);
          }

          @Override
          public void onComplete() {
            done.complete(null);
          }
        });
    return done;
  }

  public static void several(VorrangClient client, PrintStream out) {
    var request =
        Request.text("Once upon a time").outputs(3).logprobs(2).maxTokens(12).seed(7).build();
    for (Output output : client.generate(request).outputs()) {
      double logprob = output.logprobs().stream().mapToDouble(each -> each.sampled().logprob()).sum();
      out.printf("%.1f %s%n", logprob, output.text());
    }
  }

  public static String choose(VorrangClient client) {
    var request = Request.text("Is the earth flat? Answer:").choice(" yes", " no").build();
    return client.generate(request).text();
  }

  public static GenerationStream takeOver(
      VorrangClient client, String token, String requestId, long lastSequence) {
    Session session = client.openSession(SessionOptions.builder().resumeToken(token).build());
    return session.resume(requestId, lastSequence);
  }

  public static String errors(Runnable work) {
    try {
      work.run();
      return "fine";
    } catch (ConnectionLostException lost) {
      return "the server was not found again";
    } catch (VorrangException failure) {
      return switch (failure.reason()) {
        case INVALID_REQUEST -> {
          var violation = failure.violations().get(0);
          yield violation.field() + " " + violation.description();
        }
        case UNAUTHENTICATED -> "this token is not known";
        default ->
            failure.retryable()
                ? "try again in " + failure.retryAfter().orElse(Duration.ofSeconds(1))
                : failure.getMessage();
      };
    }
  }

  public static VorrangClient secure(String address, File folder, String token) throws IOException {
    return VorrangClient.builder()
        .target(address)
        .tls(new File(folder, "ca.pem"))
        .token(token)
        .build();
  }

  public static VorrangClient mutual(String address, File folder) throws IOException {
    return VorrangClient.builder()
        .target(address)
        .tls(new File(folder, "ca.pem"), new File(folder, "acme.pem"), new File(folder, "acme.key"))
        .build();
  }
}
