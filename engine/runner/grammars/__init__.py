"""Structured output where the model computes: grammars are compiled, kept, and followed token by token."""
