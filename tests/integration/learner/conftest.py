"""A tiny policy, made once for all tests here, and a pair of ranks, which may not outlive a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.training import Ranks, make_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy with random weights."""
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of a learner, as processes."""
    pair = Ranks(tmp_path_factory.mktemp("ranks"), 2)
    yield pair
    pair.close()
