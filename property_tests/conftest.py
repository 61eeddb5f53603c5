"""How hypothesis runs here: no deadlines (compilation, loaded machines), reproducible in CI."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "meantime",
    deadline=None,
    max_examples=40,
    derandomize="CI" in os.environ,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],  # slow
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
)
hypothesis.settings.load_profile("meantime")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
