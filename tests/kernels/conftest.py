"""One thread for all kernel tests: small operations on two lose far more than they win beside other work."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)
