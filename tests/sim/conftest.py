import logging

import pytest
import structlog


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of simulated requests need no line each."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.configure(**before)
