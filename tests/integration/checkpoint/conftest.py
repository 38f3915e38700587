"""A checkpoint service in this process or in one of its own, and its clients."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from offbeat.weights.client import CheckpointClient
from tests.harness.checkpoints import Running, a_process, client_of, serving
from tests.harness.service import Service


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with serving(tmp_path / "store") as running:
        yield running


@pytest.fixture
async def client(service: Running) -> AsyncIterator[CheckpointClient]:
    async with client_of(service.address) as client:
        yield client


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    with a_process(tmp_path) as process:
        yield process


@pytest.fixture
async def learner(service: Running) -> AsyncIterator[CheckpointClient]:
    async with client_of(service.address, "learner") as client:
        yield client


@pytest.fixture
async def receiver(service: Running) -> AsyncIterator[CheckpointClient]:
    async with client_of(service.address, deltas=True) as client:
        yield client
