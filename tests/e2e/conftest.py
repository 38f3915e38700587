"""Whole runs use the machine's cores as a user's do."""

import pytest


@pytest.fixture(autouse=True)
def user_environment(monkeypatch):
    """Services choose threads and engine processes themselves."""
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
