package io.vorrang.client;

import java.util.Map;
import org.junit.jupiter.api.extension.BeforeAllCallback;
import org.junit.jupiter.api.extension.ExtensionContext;
import org.junit.jupiter.api.extension.ExtensionContext.Namespace;

/** One server for all test classes that need nothing special of it; ended after the last of them. */
final class SharedServer implements BeforeAllCallback {
  private static volatile ServerProcess server;

  static String address() {
    return server.address;
  }

  static int port() {
    return server.port();
  }

  @Override
  public void beforeAll(ExtensionContext context) throws Exception {
    ServerProcess.python(); // skips the class where there is none
    var store = context.getRoot().getStore(Namespace.create(SharedServer.class));
    server = store.getOrComputeIfAbsent("server", key -> start(), ServerProcess.class);
  }

  private static ServerProcess start() {
    try {
      // A step takes long enough for a request of some hundred tokens to be met while it runs.
      return ServerProcess.start(Map.of("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.001"));
    } catch (java.io.IOException failure) {
      throw new AssertionError(failure);
    }
  }
}
