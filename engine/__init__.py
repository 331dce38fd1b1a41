"""The engine: requests, scheduler, loop, runners and models. Knows nothing of the wire."""
