package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.grpc.TlsServerCredentials;
import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.util.Base64;
import java.util.List;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Encryption and identity, against a server in this process; keytool makes the certificates. */
@Timeout(30)
class SecurityTest {
  private static final String PASSWORD = "changeit";
  private static final Request REQUEST = Request.text("x").build();

  @TempDir static Path folder;

  @BeforeAll
  static void makeCertificates() throws Exception {
    for (String name : List.of("server", "client", "stranger")) {
      Path store = folder.resolve(name + ".p12");
      var keytool = Path.of(System.getProperty("java.home"), "bin", "keytool").toString();
      var process =
          new ProcessBuilder(
                  keytool, "-genkeypair", "-alias", name, "-keyalg", "EC", "-dname", "CN=" + name,
                  "-ext", "san=ip:127.0.0.1", "-validity", "2", "-storetype", "PKCS12",
                  "-keystore", store.toString(), "-storepass", PASSWORD)
              .redirectErrorStream(true)
              .start();
      String said = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
      assertEquals(0, process.waitFor(), said);
      var keys = KeyStore.getInstance(store.toFile(), PASSWORD.toCharArray());
      byte[] key = keys.getKey(name, PASSWORD.toCharArray()).getEncoded();
      write(name + ".key", "PRIVATE KEY", key);
      write(name + ".crt", "CERTIFICATE", keys.getCertificate(name).getEncoded());
    }
  }

  @Test
  void aTokenGoesWithEveryCallOverTls() throws Exception {
    var credentials = TlsServerCredentials.create(file("server.crt"), file("server.key"));
    try (FakeServer server = new FakeServer(credentials);
        VorrangClient client =
            VorrangClient.builder()
                .target(server.address())
                .tls(file("server.crt"))
                .token("secret")
                .build()) {
      assertEquals("hello", client.generate(REQUEST).text());
      client.openSession().close();
      assertEquals(List.of("Bearer secret", "Bearer secret"), server.authorizations);
    }
  }

  @Test
  void aServerThatIsNotTrustedGetsNothing() throws Exception {
    var credentials = TlsServerCredentials.create(file("server.crt"), file("server.key"));
    try (FakeServer server = new FakeServer(credentials);
        VorrangClient client =
            VorrangClient.builder().target(server.address()).tls(file("stranger.crt")).build()) {
      assertThrows(ConnectionLostException.class, () -> client.generate(REQUEST));
      assertThrows(ConnectionLostException.class, client::openSession);
      assertEquals(List.of(), server.authorizations);
    }
  }

  @Test
  void bothSidesMayHaveToShowWhoTheyAre() throws Exception {
    var credentials =
        TlsServerCredentials.newBuilder()
            .keyManager(file("server.crt"), file("server.key"))
            .trustManager(file("client.crt"))
            .clientAuth(TlsServerCredentials.ClientAuth.REQUIRE)
            .build();
    try (FakeServer server = new FakeServer(credentials)) {
      var builder = VorrangClient.builder().target(server.address());
      var mine = builder.tls(file("server.crt"), file("client.crt"), file("client.key"));
      try (VorrangClient client = mine.build()) {
        assertEquals("hello", client.generate(REQUEST).text());
      }
      var others = builder.tls(file("server.crt"), file("stranger.crt"), file("stranger.key"));
      try (VorrangClient client = others.build()) {
        assertThrows(ConnectionLostException.class, () -> client.generate(REQUEST));
      }
    }
  }

  @Test
  void aTokenLeavesThisMachineEncryptedUnlessToldOtherwise() {
    for (String target : List.of("10.0.0.1:50051", "dns:///vorrang.example:443", "127.evil.example:1")) {
      var builder = VorrangClient.builder().target(target).token("secret");
      var refused = assertThrows(IllegalStateException.class, builder::build);
      assertFalse(refused.getMessage().contains("secret"));
      builder.plaintextToken(true).build().close();
    }
    for (String target : List.of("127.0.0.1:50051", "dns:///localhost:1", "[::1]:1", "unix:/tmp/x")) {
      VorrangClient.builder().target(target).token("secret").build().close();
    }
  }

  private static File file(String name) {
    return folder.resolve(name).toFile();
  }

  private static void write(String name, String kind, byte[] der) throws Exception {
    String body = Base64.getMimeEncoder(64, new byte[] {'\n'}).encodeToString(der);
    Files.writeString(
        folder.resolve(name), "-----BEGIN " + kind + "-----\n" + body + "\n-----END " + kind + "-----\n");
  }
}
