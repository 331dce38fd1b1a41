"""The gRPC server: parses, validates, maps errors, writes streams. Never touches blocks."""
