package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.annotations.SerializedName;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** The same acts as in Go and Python give the same texts and orders; see clients/transcript/README.md. */
@Timeout(180)
class TranscriptTest {
  private static final Path FOLDER = ServerProcess.ROOT.resolve("clients/transcript");

  private static final class Play {
    Map<String, String> settings;
    List<Act> acts;
  }

  private static final class Act {
    String id = "";
    String priority = "";
    String event = "";
    boolean read = true;

    @SerializedName("max_tokens")
    int maxTokens;

    @SerializedName("credit_tokens")
    int creditTokens;

    @SerializedName("do")
    String what;
  }

  /** What is written down of a request. */
  private record Record(List<String> events, String text) {}

  /** What is written down of all; the names in their order. */
  private record Account(Map<String, Record> requests, boolean resumed) {}

  private final Map<String, Role> roles = new TreeMap<>();
  private final String prefix = UUID.randomUUID() + "-";
  private CuttingProxy proxy;
  private Session session;

  @Test
  void theTranscriptIsTheOneOfTheOtherLanguages() throws Exception {
    var play =
        new Gson().fromJson(Files.readString(FOLDER.resolve("transcript.json")), Play.class);
    String got;
    String shared = System.getenv("VORRANG_TRANSCRIPT_SERVER"); // others perform on it as well
    if (shared != null) {
      got = perform(Integer.parseInt(shared.substring(shared.lastIndexOf(':') + 1)), play.acts);
    } else {
      try (ServerProcess server = ServerProcess.start(play.settings)) {
        got = perform(server.port(), play.acts);
      }
    }
    String out = System.getenv("VORRANG_TRANSCRIPT_OUT");
    if (out != null) {
      Files.writeString(Path.of(out), got);
    }
    assertEquals(Files.readString(FOLDER.resolve("golden.json")), got);
  }

  private String perform(int port, List<Act> acts) throws Exception {
    proxy = new CuttingProxy(port);
    try (CuttingProxy closed = proxy;
        VorrangClient client = VorrangClient.builder().target(closed.address()).build()) {
      session = client.openSession();
      String token = session.info().token();
      for (Act act : acts) {
        perform(act);
      }
      var records = new TreeMap<String, Record>();
      for (var role : roles.entrySet()) {
        records.put(role.getKey(), role.getValue().toTheEnd());
      }
      boolean resumed = session.info().token().equals(token);
      session.close();
      var json = new GsonBuilder().disableHtmlEscaping().setPrettyPrinting().create();
      return json.toJson(new Account(records, resumed)) + "\n";
    }
  }

  private void perform(Act act) throws Exception {
    Role role = roles.get(act.id);
    switch (act.what) {
      case "start" -> roles.put(act.id, start(act));
      case "wait" -> role.await(act.event);
      case "progress" -> role.awaitProgress();
      case "cancel" -> role.stream.cancel();
      case "reprioritize" -> role.stream.reprioritize(priority(act.priority));
      case "cut" -> {
        proxy.refuse(true); // so that the session can't be back before it was looked at
        proxy.cut();
        Probe.await("the session to notice", () -> !session.isConnected());
        proxy.refuse(false);
      }
      default -> throw new AssertionError("nobody knows how to do " + act.what);
    }
  }

  private Role start(Act act) {
    var request =
        Scripted.request(act.id, act.maxTokens).id(prefix + act.id).priority(priority(act.priority));
    if (act.creditTokens > 0) {
      request.creditTokens(act.creditTokens);
    }
    var role = new Role(session.start(request.build()));
    if (act.read) {
      role.read();
    }
    return role;
  }

  private static Priority priority(String text) {
    return text.matches("-?[0-9]+") ? Priority.level(Integer.parseInt(text)) : Priority.ofClass(text);
  }

  /** A request and what was seen of it. */
  private static final class Role {
    private final GenerationStream stream;
    private final Probe probe = new Probe(Long.MAX_VALUE);
    private boolean isRead;

    Role(GenerationStream stream) {
      this.stream = stream;
    }

    void read() {
      if (!isRead) {
        isRead = true;
        stream.subscribe(probe);
      }
    }

    void await(String kind) throws InterruptedException {
      read();
      Probe.await(
          kind + " of " + stream.requestId(),
          () -> probe.events.stream().anyMatch(event -> line(event).split(" ")[0].equals(kind)));
    }

    void awaitProgress() throws InterruptedException {
      int before = probe.tokens();
      Probe.await("more of " + stream.requestId(), () -> probe.tokens() > before);
    }

    /** Several deltas in a row count as one. */
    Record toTheEnd() throws Exception {
      read();
      probe.finished();
      var lines = new ArrayList<String>();
      int tokens = 0;
      for (Event event : probe.events) {
        String line = line(event);
        if (event instanceof Event.Delta delta) {
          assertEquals(tokens, delta.firstTokenIndex(), stream.requestId());
          tokens += delta.tokenIds().size();
          if (lines.get(lines.size() - 1).equals(line)) {
            continue;
          }
        }
        if (!(event instanceof Event.QueueUpdate)) {
          lines.add(line);
        }
      }
      return new Record(lines, probe.text());
    }

    private static String line(Event event) {
      if (event instanceof Event.Accepted accepted) {
        return "accepted " + accepted.level();
      } else if (event instanceof Event.Started) {
        return "started";
      } else if (event instanceof Event.Delta) {
        return "delta";
      } else if (event instanceof Event.Preempted preempted) {
        return "preempted " + preempted.reason() + " " + preempted.count();
      } else if (event instanceof Event.Resumed) {
        return "resumed";
      } else if (event instanceof Event.PriorityChanged changed) {
        return "priority_changed " + changed.level();
      } else if (event instanceof Event.Finished finished) {
        return "finished " + finished.reason() + " " + finished.usage().outputTokens();
      }
      return "queue_update";
    }
  }
}
