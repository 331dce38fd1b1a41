"""For all tests: one thread for each operation, unless a test asks for more, and compiled modules are kept.

Tests run side by side, and two OpenMP threads beside a busy neighbour wait for each
other at every operation: the suite took half as long again. Tests start many programs;
where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers, every one of them would
compile all our modules anew.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
