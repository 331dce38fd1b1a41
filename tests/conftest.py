"""For all tests: one thread for each operation, unless a test asks for more, and compiled modules are kept.

Tests run side by side, and two OpenMP threads beside a busy neighbour wait for each
other at every operation: the suite took half as long again. Tests start many programs;
where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers, every one of them would
compile all our modules anew. No example of Hypothesis fails for being slow.
"""

import os
import sys

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
