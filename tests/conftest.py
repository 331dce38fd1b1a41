"""For all tests: one thread for each operation, unless a test asks for more.

Tests run side by side, and two OpenMP threads beside a busy neighbour wait for each
other at every operation: the suite took half as long again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
