"""The Python client and its command line."""
