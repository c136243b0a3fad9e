"""One thread per test process: tensors are tiny, and threads that wait for each other cost more than they bring."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever a test before has set."""
    torch.set_num_threads(1)
