"""The scheduler: pure and synchronous. Time, randomness and I/O are arguments."""
