"""Generated messages and stubs of the package vorrang.v1."""
