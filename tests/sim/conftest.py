import logging

import pytest
import structlog

from tests.support.drawn import Replay


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of simulated requests need no line each."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.configure(**before)


@pytest.fixture
def replay(request):
    """Names the draw under way when a test fails in it."""
    return Replay(request, request.getfixturevalue("seed"))
