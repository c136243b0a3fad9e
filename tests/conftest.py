"""One thread per test process: tensors are tiny, and threads that wait for each other cost more than they bring. What
the tests convert is not the user's latest conversion."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever a test before has set."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def a_state_of_its_own(tmp_path_factory):
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
