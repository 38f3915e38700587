"""Bad input to a whole run: it stops with one clear line from the process that knows, and leaves nothing half done."""

import subprocess
from pathlib import Path

import pytest

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.errors import CheckpointError
from offbeat.local.redis_server import RedisServer
from tests.harness.whole_run import start, write_recipe


def last_line(run) -> str:
    """The last line that the command printed."""
    return Path(run._log.name).read_text().strip().splitlines()[-1]


@pytest.mark.slow
def test_a_reward_function_that_always_raises(tmp_path):
    recipe = write_recipe(tmp_path)
    (tmp_path / "reward.py").write_text("def early_letters(completions):\n    return 1 / 0\n")
    with start(recipe) as run:
        assert run.wait() != 0
        text = run.output()
        assert "early_letters" in text
        assert "division by zero" in text
        assert "Traceback" not in Path(run._log.name).read_text()


@pytest.mark.slow
def test_a_redis_that_may_evict(tmp_path):
    import redis

    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", max_memory_bytes=2**28)
    server.start()
    try:
        redis.Redis.from_url(server.url).config_set("maxmemory-policy", "allkeys-lru")
        with start(write_recipe(tmp_path), f"redis.url={server.url}") as run:
            assert run.wait() == 2
            assert "allkeys-lru" in last_line(run)
            assert "noeviction" in last_line(run)
    finally:
        server.stop()


def test_no_space_for_a_checkpoint(tmp_path):
    """A real full file system; needs the right to mount one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        checkpoints = Checkpoints(tmp_path, keep=2)
        first = checkpoints.begin(1, 1)
        (first / "state").write_bytes(b"x" * 100_000)
        checkpoints.commit(first, Meta(1, 1, 1, {}, []))
        second = checkpoints.begin(1, 2)
        # What the trainer's own file leaves is too little for the rest.
        (second / "state").write_bytes(b"x" * 140_000)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.commit(second, Meta(2, 2, 1, {i: (i, i) for i in range(1000)}, []))
        assert checkpoints.latest().step == 1
    finally:
        subprocess.run(["umount", str(folder)], check=True)
