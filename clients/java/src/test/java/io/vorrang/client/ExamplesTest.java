package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.ExtendWith;

/** What the documents tell a new user to run is what is compiled here, and it runs. */
@ExtendWith(SharedServer.class)
@Timeout(180)
class ExamplesTest {
  private static final Path FIRST_CLIENT =
      Path.of("src/main/java/io/vorrang/examples/FirstClient.java");
  private static final String DEFAULT_ADDRESS = "127.0.0.1:50051";

  @Test
  void theReadmesSnippetIsTheFirstClient() throws IOException {
    String readme = Files.readString(ServerProcess.ROOT.resolve("README.md"));
    Matcher snippet = Pattern.compile("(?s)### Java\n.*?```java\n(.*?)```").matcher(readme);
    assertTrue(snippet.find(), "the README has a Java snippet");
    String source = Files.readString(FIRST_CLIENT).replaceFirst("package .*;\n\n", "");
    assertEquals(source, snippet.group(1));
  }

  @Test
  void theFirstClientWorksAsItStands() throws Exception {
    // The address is written in it, so it is compiled again with another one, as a user would.
    String source = Files.readString(FIRST_CLIENT);
    assertTrue(source.contains(DEFAULT_ADDRESS));
    Path file = Path.of("target", "first-client", "FirstClient.java");
    Files.createDirectories(file.getParent());
    Files.writeString(file, source.replace(DEFAULT_ADDRESS, SharedServer.address()));
    String output = java("", List.of(file.toString()));
    String question = Scripted.continuation("user: What is the capital of France?\nassistant: ", 16);
    String report = Scripted.continuation("Once upon a time", 64);
    assertEquals(
        "question: " + question + "\nreport: " + report + " (0 times preempted)\n", output);
  }

  @Test
  void theChatAnswersLineByLine() throws Exception {
    String output =
        java("hi\n\nand now?\n", List.of("io.vorrang.examples.Chat", SharedServer.address(), "5"));
    Matcher said =
        Pattern.compile("you: model: (.{5}) \\[LENGTH\\]\nyou: you: model: (.{5}) \\[LENGTH\\]\nyou: \n")
            .matcher(output);
    assertTrue(said.matches(), output);
  }

  private static String java(String input, List<String> arguments) throws Exception {
    var command = new ArrayList<String>();
    command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
    command.addAll(List.of("-cp", System.getProperty("java.class.path")));
    command.addAll(arguments);
    var process = new ProcessBuilder(command).redirectErrorStream(true).start();
    try (OutputStream in = process.getOutputStream()) {
      in.write(input.getBytes(StandardCharsets.UTF_8));
    }
    String output = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
    assertTrue(process.waitFor(30, TimeUnit.SECONDS), output);
    assertEquals(0, process.exitValue(), output);
    return output;
  }
}
