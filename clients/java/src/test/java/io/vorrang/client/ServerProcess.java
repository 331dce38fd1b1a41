package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The real server with its scripted model, on a free port of this machine. Its Python is {@code
 * VORRANG_PYTHON}, else the repository's own environment; without either the tests are skipped.
 */
final class ServerProcess implements AutoCloseable {
  static final Path ROOT = Path.of("../..").toAbsolutePath().normalize();
  private static final Pattern READY = Pattern.compile("ready on (\\S+:\\d+): .*");

  private final Process process;
  private final BufferedReader output;
  final String address;

  private ServerProcess(Process process, BufferedReader output, String address) {
    this.process = process;
    this.output = output;
    this.address = address;
  }

  /**
   * Starts it and waits until it is ready.
   *
   * @param settings environment variables, such as {@code VORRANG_SESSION__RESUME_GRACE_S}
   */
  static ServerProcess start(Map<String, String> settings) throws IOException {
    Path python = python();
    var builder =
        new ProcessBuilder(
            List.of(
                python.toString(), "-m", "server.cli", "serve",
                "--listen", "127.0.0.1:0", "--model", "scripted"));
    var environment = builder.environment();
    environment.keySet().removeIf(name -> name.startsWith("VORRANG_"));
    environment.put("PYTHONPATH", ROOT + ":" + ROOT.resolve("protos"));
    environment.put("VORRANG_ENGINE__RUNNER", "inline");
    environment.putAll(settings);
    Path log = Files.createTempFile(Path.of("target"), "server-", ".log");
    var process = builder.directory(ROOT.toFile()).redirectError(log.toFile()).start();
    var output = process.inputReader();
    String line = output.readLine();
    Matcher ready = READY.matcher(line == null ? "" : line);
    if (!ready.matches()) {
      process.destroyForcibly();
      throw new IOException("the server did not get ready: " + line + Files.readString(log));
    }
    return new ServerProcess(process, output, ready.group(1));
  }

  /** Has those made that tests/support/certificates.py knows: ca, server, client, and a stranger's. */
  static void makeCertificates(Path folder) throws Exception {
    var builder =
        new ProcessBuilder(
            python().toString(), "-m", "tests.support.certificates", folder.toString());
    builder.environment().put("PYTHONPATH", ROOT + ":" + ROOT.resolve("protos"));
    var process = builder.directory(ROOT.toFile()).redirectErrorStream(true).start();
    String said = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
    assertEquals(0, process.waitFor(), said);
  }

  static Path python() {
    String named = System.getenv("VORRANG_PYTHON");
    if (named != null && !named.isEmpty()) {
      assertTrue(Files.isExecutable(Path.of(named)), "VORRANG_PYTHON is no program: " + named);
      return Path.of(named).toAbsolutePath();
    }
    Path python = ROOT.resolve(".venv/bin/python");
    assumeTrue(
        Files.isExecutable(python),
        "no Python to start the server with: set VORRANG_PYTHON, or run `make setup` (tried " + python + ")");
    return python;
  }

  int port() {
    return Integer.parseInt(address.substring(address.lastIndexOf(':') + 1));
  }

  /** Asks it to drain and end, as {@code SIGTERM} does. */
  void terminate() {
    process.destroy();
  }

  /** Ends it as a fault of the machine would. */
  void kill() {
    process.destroyForcibly();
  }

  void awaitEnd() throws InterruptedException {
    if (!process.waitFor(20, TimeUnit.SECONDS)) {
      throw new AssertionError("the server still runs");
    }
  }

  @Override
  public void close() throws IOException {
    process.destroyForcibly();
    output.close();
  }
}
