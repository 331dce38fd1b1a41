"""Model definitions, weight loading and tokenizers."""
