package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import io.vorrang.examples.Guide;
import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** TLS, tokens, certificates and caps, against the real server with tenants. */
@Timeout(180)
class TenantsTest {
  private static final String ACME = "acme-token-0123456789";
  private static final String OTHERS = "others-token-0123456789";
  private static final Request REQUEST = Scripted.request("hello", 5).build();

  @TempDir static Path folder;

  @BeforeAll
  static void makeCertificates() throws Exception {
    ServerProcess.makeCertificates(folder);
  }

  @Test
  void aTokenNamesATenantWhosePriorityIsCapped() throws Exception {
    try (ServerProcess server = ServerProcess.start(settings(false))) {
      try (VorrangClient client = Guide.secure(server.address, folder.toFile(), ACME)) {
        assertCapped(client);
        Result whole =
            client.generate(Scripted.request("hello", 5).priority(Priority.INTERACTIVE).build());
        assertEquals(Scripted.continuation("hello", 5), whole.text());
        assertTrue(whole.accepted().capped());
      }
      var nobody = VorrangClient.builder().target(server.address).tls(file("ca.pem"));
      assertNobody(nobody);
      assertNobody(nobody.token("wrong-token-0123456789"));
    }
  }

  @Test
  void aServerThatIsNotTrustedIsNotTalkedTo() throws Exception {
    try (ServerProcess server = ServerProcess.start(settings(false))) {
      var builder = VorrangClient.builder().target(server.address);
      assertUnreachable(builder); // plaintext
      assertUnreachable(builder.tls(file("stranger-ca.pem")));
    }
  }

  @Test
  void aCertificateNamesATenant() throws Exception {
    try (ServerProcess server = ServerProcess.start(settings(true))) {
      var builder = VorrangClient.builder().target(server.address);
      try (VorrangClient client = Guide.mutual(server.address, folder.toFile())) {
        assertCapped(client);
      }
      assertUnreachable(builder.tls(file("ca.pem")));
      assertUnreachable(builder.tls(file("ca.pem"), file("stranger.pem"), file("stranger.key")));
    }
  }

  @Test
  void aLostSessionIsResumedByItsTenantAlone() throws Exception {
    var settings = settings(false);
    settings.put("VORRANG_ENGINE__SCRIPTED_STEP_S", "0.005");
    try (ServerProcess server = ServerProcess.start(settings);
        CuttingProxy proxy = new CuttingProxy(server.port());
        VorrangClient client = Guide.secure(proxy.address(), folder.toFile(), ACME);
        Session session = client.openSession()) {
      var probe = Probe.on(session.start(Scripted.request("hello", 200).build()), Long.MAX_VALUE);
      Probe.await("tokens", () -> probe.tokens() > 10);
      var options = SessionOptions.builder().resumeToken(session.info().token()).build();
      try (VorrangClient others = Guide.secure(server.address, folder.toFile(), OTHERS)) {
        var refused = assertThrows(VorrangException.class, () -> others.openSession(options));
        assertEquals(Reason.RESUME_OUT_OF_RANGE, refused.reason());
      }
      proxy.refuse(true);
      proxy.cut();
      Probe.await("the session to notice", () -> !session.isConnected());
      proxy.refuse(false);
      probe.finished();
      assertEquals(Scripted.continuation("hello", 200), probe.text());
    }
  }

  /** The client is acme's, and so as urgent alone as acme may be. */
  private static void assertCapped(VorrangClient client) throws Exception {
    try (Session session = client.openSession()) {
      assertEquals(5, session.info().defaultLevel());
      var request = Scripted.request("urgent", 50).creditTokens(2).priority(Priority.INTERACTIVE);
      GenerationStream stream = session.start(request.build());
      Iterator<Event> events = stream.iterator();
      var accepted = (Event.Accepted) events.next();
      assertEquals(0, accepted.level());
      assertTrue(accepted.capped());
      assertEquals(-10, accepted.requestedLevel());
      // It is not read, so its credit keeps it alive meanwhile.
      assertEquals(
          new Event.PriorityChanged(0, true, false),
          stream.reprioritize(Priority.level(-50)).get(60, TimeUnit.SECONDS));
      assertEquals(
          new Event.PriorityChanged(7, false, false),
          stream.reprioritize(Priority.level(7)).get(60, TimeUnit.SECONDS));
      var text = new StringBuilder();
      while (events.hasNext()) {
        if (events.next() instanceof Event.Delta delta) {
          text.append(delta.text());
        }
      }
      assertEquals(Scripted.continuation("urgent", 50), text.toString());
      Event.Accepted usual = session.start(REQUEST).result().accepted();
      assertEquals(5, usual.level());
      assertFalse(usual.capped());
    }
  }

  private static void assertNobody(VorrangClient.Builder builder) {
    try (VorrangClient client = builder.build()) {
      var refused = assertThrows(VorrangException.class, () -> client.generate(REQUEST));
      assertEquals(Reason.UNAUTHENTICATED, refused.reason());
      assertEquals(Status.Code.UNAUTHENTICATED, refused.code());
      refused = assertThrows(VorrangException.class, client::openSession);
      assertEquals(Reason.UNAUTHENTICATED, refused.reason());
    }
  }

  private static void assertUnreachable(VorrangClient.Builder builder) {
    try (VorrangClient client = builder.build()) {
      assertThrows(ConnectionLostException.class, () -> client.generate(REQUEST));
      assertThrows(ConnectionLostException.class, client::openSession);
    }
  }

  /** TLS, and two tenants: acme, which may ask for level 0 at most, and others. */
  private static Map<String, String> settings(boolean mutual) throws Exception {
    var settings =
        new HashMap<>(
            Map.of(
                "VORRANG_TLS__CERTIFICATE", file("server.pem").toString(),
                "VORRANG_TLS__PRIVATE_KEY", file("server.key").toString(),
                "VORRANG_TENANTS__ACME__TOKEN_HASHES", hashes(ACME),
                "VORRANG_TENANTS__ACME__CERTIFICATE_SUBJECTS", "[\"CN=acme\"]",
                "VORRANG_TENANTS__ACME__MOST_URGENT_LEVEL", "0",
                "VORRANG_TENANTS__ACME__DEFAULT_LEVEL", "5",
                "VORRANG_TENANTS__OTHERS__TOKEN_HASHES", hashes(OTHERS)));
    if (mutual) {
      settings.put("VORRANG_TLS__CLIENT_CA", file("ca.pem").toString());
    }
    return settings;
  }

  private static String hashes(String token) throws Exception {
    var digest = MessageDigest.getInstance("SHA-256").digest(token.getBytes(StandardCharsets.UTF_8));
    return "[\"sha256:" + HexFormat.of().formatHex(digest) + "\"]";
  }

  private static File file(String name) {
    return folder.resolve(name).toFile();
  }
}
