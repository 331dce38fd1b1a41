package io.vorrang.examples;

import io.vorrang.client.Event;
import io.vorrang.client.FinishReason;
import io.vorrang.client.GenerationStream;
import io.vorrang.client.Message;
import io.vorrang.client.Priority;
import io.vorrang.client.Request;
import io.vorrang.client.Session;
import io.vorrang.client.VorrangClient;
import io.vorrang.client.VorrangException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.Charset;
import java.util.ArrayList;
import java.util.List;

/**
 * A conversation on a terminal, over one session. Arguments: the server's address, and the most tokens
 * of an answer. The enter key while an answer comes stops it; end of input ends the program.
 */
final class Chat {
  private final Session session;
  private final int maxTokens;
  private final boolean isTerminal = System.console() != null;
  private final BufferedReader in;
  private final PrintStream out;
  private final List<Message> messages = new ArrayList<>();

  Chat(Session session, int maxTokens, BufferedReader in, PrintStream out) {
    this.session = session;
    this.maxTokens = maxTokens;
    this.in = in;
    this.out = out;
  }

  public static void main(String[] arguments) throws IOException {
    String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    int maxTokens = arguments.length > 1 ? Integer.parseInt(arguments[1]) : 256;
    var in = new BufferedReader(new InputStreamReader(System.in, Charset.defaultCharset()));
    try (var client = VorrangClient.builder().target(target).build();
        var session = client.openSession()) {
      new Chat(session, maxTokens, in, System.out).run();
    } catch (VorrangException failure) {
      System.err.println("vorrang: " + failure.getMessage());
      System.exit(1);
    }
  }

  void run() throws IOException {
    while (true) {
      out.print("you: ");
      out.flush();
      String line = in.readLine();
      if (line == null) {
        out.println();
        return;
      }
      if (!line.isBlank()) {
        answer(line);
      }
    }
  }

  private void answer(String question) throws IOException {
    messages.add(Message.user(question));
    var request = Request.chat(messages).priority(Priority.INTERACTIVE).maxTokens(maxTokens).build();
    var text = new StringBuilder();
    out.print("model: ");
    try (GenerationStream stream = session.start(request)) {
      for (Event event : stream) {
        if (event instanceof Event.Delta delta) {
          text.append(delta.text());
          out.print(delta.text());
          out.flush();
        } else if (event instanceof Event.QueueUpdate update) {
          out.print("[" + update.queuePosition() + " before you] ");
        } else if (event instanceof Event.Preempted) {
          out.print("[somebody more urgent is served] ");
        } else if (event instanceof Event.Finished finished) {
          out.println(finished.reason() == FinishReason.STOP ? "" : " [" + finished.reason() + "]");
        }
        if (isTerminal && in.ready()) {
          in.readLine();
          stream.cancel();
        }
      }
      messages.add(Message.assistant(text.toString()));
    } catch (VorrangException failure) {
      messages.remove(messages.size() - 1);
      out.println("[" + failure.getMessage() + "]");
    }
  }
}
