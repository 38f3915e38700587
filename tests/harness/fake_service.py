"""Stands in for a service in tests of the local runner: it has an address, ends on SIGTERM, and does no work.

The environment variable FAKE_LEARNER says what the learner does: `finishes` (serving WatchProgress), `crashes first`
(then finishes), `waits` (until SIGTERM), `refuses` (a configuration error). Only the first two import Offbeat, for the
sake of speed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MODULES = {
    "checkpoint.py": "main('checkpoint')",
    "generator.py": "main('generator')",
    "reward.py": "main('reward')",
    "learner/__main__.py": "main('learner')",
    "learner/prepare.py": "prepare()",
    "learner/export.py": "export()",
}


def install(folder: Path) -> None:
    """Writes a package `services` into `folder`; a process started there runs it, not the real one."""
    for name, call in MODULES.items():
        path = folder / "services" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        text = f"import sys; sys.path.append({str(REPOSITORY)!r})\n"
        text += f"from tests.harness import fake_service; fake_service.{call}\n"
        path.write_text(text)


def prepare() -> None:
    """Makes what looks like a model, and says so."""
    import yaml

    model = yaml.safe_load(Path(_argument("--recipe")).read_text())["model"]["path"]
    Path(model).mkdir()
    (Path(model) / "config.json").write_text("{}")
    print("prepared", flush=True)


def export() -> None:
    """Makes the folder that was asked for."""
    print(f"exporting {_argument('--run')}", flush=True)
    Path(_argument("--out")).mkdir()


def _argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main(name: str) -> None:
    """Entry point of each of them."""
    print(f"{name} is told {sys.argv[1:]}", flush=True)
    print(f"threads {os.environ.get('OMP_NUM_THREADS')}", flush=True)
    folder = Path(_argument("--recipe")).parent
    behaviour = os.environ["FAKE_LEARNER"] if name == "learner" else "waits"
    if behaviour == "waits":
        _wait(folder, name)
    elif behaviour == "refuses":
        print("learner.reference: expected a model folder, found none", file=sys.stderr)
        sys.exit(2)
    elif behaviour == "crashes first" and not (folder / "crashed").exists():
        (folder / "crashed").touch()
        sys.exit(1)
    else:
        _train(folder)


def _wait(folder: Path, name: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _say_address(folder, name, "127.0.0.1:9")
    time.sleep(1000)


def _say_address(folder: Path, name: str, address: str) -> None:
    path = folder / "addresses" / f"{name}.fake-{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(address)
    partial.rename(path)


def _train(folder: Path) -> None:
    import asyncio

    asyncio.run(_serve_progress(folder))
    lines = [{"step": 0, "eval/greedy/pass@1": 0.25}, {"step": 3, "eval/greedy/pass@1": 0.75}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "export").mkdir()


async def _serve_progress(folder: Path) -> None:
    """Serves three steps to one watcher."""
    import asyncio

    from offbeat.config.service import RpcSettings
    from offbeat.rpc import RpcServer
    from offbeat.v1 import learner_pb2 as learner
    from offbeat.v1 import learner_pb2_grpc as learner_grpc

    told = asyncio.Event()

    class Learner(learner_grpc.LearnerServiceServicer):
        async def WatchProgress(self, request, context):  # type: ignore[no-untyped-def]
            for step in range(4):
                progress = learner.Progress(
                    state=learner.LEARNER_STATE_TRAINING, step=step, total_steps=3
                )
                progress.metrics["reward/mean"] = 0.25 * step
                yield learner.WatchProgressResponse(progress=progress)
            progress.state = learner.LEARNER_STATE_FINISHED
            told.set()
            yield learner.WatchProgressResponse(progress=progress)

    server = RpcServer(
        RpcSettings(),
        "offbeat.v1.LearnerService",
        lambda server: learner_grpc.add_LearnerServiceServicer_to_server(Learner(), server),
    )
    await server.start()
    _say_address(folder, "learner", server.address)
    await told.wait()
    await server.stop(1.0)
