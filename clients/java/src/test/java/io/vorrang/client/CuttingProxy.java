package io.vorrang.client;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** Between client and server on this machine; its connections can be cut, and new ones refused. */
final class CuttingProxy implements AutoCloseable {
  private final ServerSocket socket;
  private volatile int serverPort;
  private final Set<Socket> sockets = ConcurrentHashMap.newKeySet();
  private final Set<Socket> silent = ConcurrentHashMap.newKeySet();
  private volatile boolean refusing;

  CuttingProxy(int serverPort) throws IOException {
    this.serverPort = serverPort;
    socket = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    daemon(this::accept);
  }

  String address() {
    return "127.0.0.1:" + socket.getLocalPort();
  }

  /** Cuts all connections; new ones are taken. */
  void cut() {
    for (Socket open : sockets) {
      close(open);
    }
    sockets.clear();
  }

  /** Where new connections lead. */
  void serverPort(int port) {
    serverPort = port;
  }

  /** Whether new connections are closed at once. */
  void refuse(boolean refusing) {
    this.refusing = refusing;
  }

  /** Carries nothing more on the connections there are, without closing them; new ones work. */
  void silence() {
    silent.addAll(sockets);
  }

  @Override
  public void close() throws IOException {
    socket.close();
    cut();
  }

  private void accept() {
    try {
      while (true) {
        Socket client = socket.accept();
        if (refusing) {
          close(client);
          continue;
        }
        Socket server = new Socket(InetAddress.getLoopbackAddress(), serverPort);
        sockets.add(client);
        sockets.add(server);
        daemon(() -> pump(client, server));
        daemon(() -> pump(server, client));
      }
    } catch (IOException closed) {
      cut();
    }
  }

  private void pump(Socket from, Socket to) {
    byte[] bytes = new byte[8192];
    try (InputStream in = from.getInputStream();
        OutputStream out = to.getOutputStream()) {
      for (int size = in.read(bytes); size >= 0; size = in.read(bytes)) {
        if (!silent.contains(from)) {
          out.write(bytes, 0, size);
        }
      }
    } catch (IOException cut) {
      close(to);
    }
  }

  private static void close(Socket open) {
    try {
      open.setSoLinger(true, 0); // a reset, as of a machine that vanished
      open.close();
    } catch (IOException closed) {
      return;
    }
  }

  private static void daemon(Runnable work) {
    var thread = new Thread(work, "cutting-proxy");
    thread.setDaemon(true);
    thread.start();
  }
}
