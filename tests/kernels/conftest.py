from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, and an operation whose result may differ from run to run raises."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all() and torch.ones(8).new_empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
