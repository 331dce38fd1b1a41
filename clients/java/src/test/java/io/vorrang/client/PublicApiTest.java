package io.vorrang.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.io.IOException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;

/** What users may rely on is written down, so that it changes on purpose alone. */
class PublicApiTest {
  private static final Path CLASSES = Path.of("target/classes/io/vorrang/client");
  private static final Set<String> OF_EVERY_RECORD = Set.of("equals", "hashCode", "toString");
  private static final Path EXPECTED = Path.of("src/test/resources/public-api.txt");

  @Test
  void thePublicApiIsTheOneWrittenDown() throws Exception {
    String found = String.join("\n", publicMethods()) + "\n";
    if (System.getenv("VORRANG_WRITE_API") != null) {
      Files.createDirectories(EXPECTED.getParent());
      Files.writeString(EXPECTED, found);
    }
    assertEquals(
        Files.readString(EXPECTED), found, "on purpose? VORRANG_WRITE_API=1 writes " + EXPECTED);
  }

  private static TreeSet<String> publicMethods() throws IOException, ClassNotFoundException {
    var lines = new TreeSet<String>();
    try (var files = Files.list(CLASSES)) {
      for (Path file : files.toList()) {
        String name = file.getFileName().toString().replace(".class", "");
        if (name.equals("package-info") || name.matches(".*\\$\\d+")) {
          continue;
        }
        Class<?> type = Class.forName("io.vorrang.client." + name);
        if (isPublic(type)) {
          lines.add(type.getCanonicalName());
          Arrays.stream(type.getDeclaredMethods())
              .filter(method -> Modifier.isPublic(method.getModifiers()) && !method.isSynthetic())
              .filter(method -> !OF_EVERY_RECORD.contains(method.getName()))
              .forEach(method -> lines.add(type.getCanonicalName() + "." + signature(method)));
        }
      }
    }
    return lines;
  }

  private static boolean isPublic(Class<?> type) {
    for (Class<?> outer = type; outer != null; outer = outer.getEnclosingClass()) {
      if (!Modifier.isPublic(outer.getModifiers())) {
        return false;
      }
    }
    return true;
  }

  private static String signature(Method method) {
    String parameters =
        Arrays.stream(method.getGenericParameterTypes())
            .map(PublicApiTest::shortName)
            .collect(Collectors.joining(", "));
    return method.getName() + "(" + parameters + "): " + shortName(method.getGenericReturnType());
  }

  private static String shortName(java.lang.reflect.Type type) {
    return type.getTypeName().replaceAll("[\\w.]+\\.(?=\\w)", "");
  }
}
