"""Puts the learner together, on every rank. Used by the entry point alone."""

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from prometheus_client import CollectorRegistry

from offbeat.checkpoints import Checkpoint, Checkpoints, Meta
from offbeat.config import Recipe
from offbeat.errors import ConfigError
from offbeat.ledger import Ledger, finished, newest_numbers
from offbeat.resume import check_settings, fixed_settings
from offbeat.rpc import RpcServer
from offbeat.rpc.deadline import END_SECONDS, end_in_time
from offbeat.rpc.entry import run_folder, write_address
from offbeat.streams.redis import RedisLearnerStreams
from offbeat.telemetry.metrics import start_metrics
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import learner_pb2 as learner
from offbeat.v1 import learner_pb2_grpc as learner_grpc
from offbeat.weights.client import CheckpointClient
from services.learner.background import Background
from services.learner.cohorts import Cohorts
from services.learner.coordinator import Coordinator
from services.learner.data.dataset import Dataset
from services.learner.data.prompts import Prompt
from services.learner.evaluation import Evaluator
from services.learner.loop import Loop
from services.learner.model import check_model
from services.learner.part_publisher import PartPublisher
from services.learner.progress import Board, Controls
from services.learner.ranks import Ranks, follow
from services.learner.recorder import Recorder
from services.learner.scaling import Scaling
from services.learner.service import SERVICE_NAME, LearnerServicer
from services.learner.stopping import on_stop_signals
from services.learner.tasks import TaskMaker
from services.learner.trainer import Trainer

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 24
"""Of a completion in Redis: token id, log-prob, its part of the text, protobuf framing."""
GROUP_OVERHEAD_BYTES = 2048
DATA_FILE = "data.json"
"""In the run's folder: what became of the rows of each source."""
STOPPED = 143
"""Exit code of a learner that was told to stop before the run's end."""


def run_rank(recipe: Recipe, *, rank: int, world: int, dataset: Dataset | None) -> int:
    """Runs one rank of the learner; returns the process's exit code. `dataset`: on rank 0 alone."""
    folder = run_folder(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    check_model(recipe.model.path, max_context=recipe.model.max_context)
    checkpoints = Checkpoints(folder, keep=recipe.learner.checkpoints.keep)
    found = checkpoints.latest()
    if found is not None:
        check_settings(found, recipe)
        if found.step == recipe.schedule.steps and finished(folder):
            log.info(
                "run %s is finished already, after %d steps; nothing is left to do. Its results are in %s. To train "
                "anew, give another run.id; to go on with it, raise schedule.steps",
                recipe.run_id, found.step, folder,
            )  # fmt: skip
            return 0
    trainer = Trainer(recipe, rank=rank, world=world)
    if found is not None:
        log.info("resuming from %s", found.path)
        trainer.load(found.path)
    try:
        if dataset is None:
            # The launcher tells every rank to stop; rank 0 stops them after it has saved.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with PartPublisher(recipe, rank) as publisher:
                follow(trainer, publisher)
            return 0
        ranks = Ranks(trainer, world)
        try:
            return _run_first_rank(recipe, folder, ranks, checkpoints, found, world, dataset)
        finally:
            ranks.end()
    finally:
        trainer.close()


def _run_first_rank(
    recipe: Recipe,
    folder: Path,
    ranks: Ranks,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    world: int,
    dataset: Dataset,
) -> int:
    learner_id = f"{socket.gethostname()}-{os.getpid()}"
    (folder / DATA_FILE).write_text(json.dumps(dataset.as_dict(), indent=1), encoding="utf-8")
    controls = Controls()
    recorder = Recorder(recipe, folder, learner_id)
    with Background() as background:
        board = Board(total_steps=recipe.schedule.steps, event_loop=background.loop)
        servicer = LearnerServicer(
            board, controls, run_id=recipe.run_id, learner_id=learner_id, ranks=world
        )
        scaling = Scaling(board)
        server = background.call(_serve(recipe, servicer, scaling, learner_id))

        def stop() -> None:
            background.start(server.health.set_ready(False))
            controls.request_stop()

        with on_stop_signals(background, stop):
            try:
                loop = background.call(
                    _prepare(
                        recipe,
                        folder,
                        ranks,
                        background,
                        board,
                        controls,
                        recorder,
                        scaling,
                        checkpoints,
                        found,
                        learner_id,
                        dataset,
                    )
                )
                if not controls.stop.is_set():
                    background.call(server.health.set_ready(True))
                finished = loop.run()
                background.call(loop.coordinator.close(finished=finished))
                if finished:
                    board.update(state=learner.LEARNER_STATE_FINISHED)
                return 0 if finished or controls.stopped_by_caller else STOPPED
            finally:
                # All of the run is written. Ended for this, the next learner finds it finished and ends with 0.
                end_in_time(2 * END_SECONDS)
                error = sys.exc_info()[1]
                if error is not None:
                    text = str(error) or repr(error)
                    board.update(state=learner.LEARNER_STATE_FAILED, error=text)
                recorder.close()
                background.call(server.stop(grace_seconds=2.0))


async def _serve(
    recipe: Recipe, servicer: LearnerServicer, scaling: Scaling, learner_id: str
) -> RpcServer:
    server = RpcServer(
        recipe.learner.rpc,
        SERVICE_NAME,
        lambda grpc_server: learner_grpc.add_LearnerServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    await server.start()
    registry = CollectorRegistry()
    registry.register(scaling)
    metrics_port = start_metrics(recipe.learner.rpc, registry)
    write_address(recipe, "learner", "0", server.address)
    log.info("listening on %s as %s, metrics port %s", server.address, learner_id, metrics_port)
    return server


async def _prepare(
    recipe: Recipe,
    folder: Path,
    ranks: Ranks,
    background: Background,
    board: Board,
    controls: Controls,
    recorder: Recorder,
    scaling: Scaling,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    learner_id: str,
    dataset: Dataset,
) -> Loop:
    """Takes over the run, and makes the loop."""
    meta = (
        found.meta()
        if found is not None
        else Meta(0, 0, 0, {}, [], settings=fixed_settings(recipe))
    )
    if recipe.redis.url is None or recipe.checkpoint.address is None:
        raise ConfigError(
            "the learner needs redis.url and checkpoint.address: `offbeat run` sets them, "
            "elsewhere give them in the recipe"
        )
    prompts = dataset.train.all
    _check_prompts(meta, prompts)
    cohorts = Cohorts(
        prompts_per_step=recipe.schedule.cohort_size,
        max_lag=recipe.schedule.max_lag,
        total_steps=recipe.schedule.steps,
        first_step=meta.step,
    )
    cohorts.lineage.versions.update(meta.lineage)
    coordinator = Coordinator(
        recipe,
        streams=RedisLearnerStreams(recipe.redis.url, recipe.run_id, learner_id, recipe.redis),
        weights=CheckpointClient(recipe.checkpoint.address, recipe.run_id, learner_id),
        cohorts=cohorts,
        tasks=TaskMaker(recipe, dataset.train),
        evaluator=Evaluator(recipe, dataset.heldout) if recipe.evaluation is not None else None,
    )
    parent = [meta.term, meta.step] if found is not None else None
    term, version = newest_numbers(folder)
    meta.term = await coordinator.start(
        learner_id=learner_id,
        term_floor=max(meta.term, term),
        version_floor=version,
        needed_bytes=needed_bytes(recipe),
    )
    meta.history.append((meta.term, meta.step))
    coordinator.ledger = Ledger(folder, meta.term)
    coordinator.ledger.write(
        "start", term=meta.term, step=meta.step, parent=parent, max_lag=recipe.schedule.max_lag
    )
    recorder.start(meta.term, meta.step, fence=coordinator.ledger.check)
    log.info("term %d starts at step %d of %d", meta.term, meta.step, recipe.schedule.steps)
    return Loop(
        recipe,
        run_folder=folder,
        ranks=ranks,
        background=background,
        coordinator=coordinator,
        board=board,
        controls=controls,
        recorder=recorder,
        scaling=scaling,
        checkpoints=checkpoints,
        meta=meta,
        identity=identity(recipe, dataset.tokenizer),
        first_sequences=[prompt.token_ids for prompt in prompts if len(prompt.token_ids) > 1][:8],
    )


def _check_prompts(meta: Meta, prompts: Sequence[Prompt]) -> None:
    """Raises `ConfigError` when ordinals would mean other prompts than before: data, tokenizer or limits changed."""
    hasher = blake3()
    for prompt in prompts:
        hasher.update(json.dumps(prompt.token_ids).encode())
    found = hasher.hexdigest()
    before = meta.settings.setdefault("data.prompts", found)
    if before != found:
        raise ConfigError(
            f"the run can't be resumed: its training prompts are not those that it began with ({len(prompts)} now); "
            "restore the data, the tokenizer and the limits on lengths, or start a new run"
        )


def needed_bytes(recipe: Recipe) -> int:
    """Redis memory that the cohorts of (max_lag + 1 + checkpoint interval) steps can take, in bytes."""
    schedule, sampling = recipe.schedule, recipe.sampling
    steps = schedule.max_lag + 1 + recipe.learner.checkpoints.every_steps
    prompt = recipe.data.max_prompt_tokens * BYTES_PER_TOKEN
    group = GROUP_OVERHEAD_BYTES + prompt + sampling.k * sampling.max_tokens * BYTES_PER_TOKEN
    waiting = (
        recipe.learner.checkpoints.max_unsettled_bytes
        + (schedule.max_lag + 1) * schedule.cohort_size * group
    )
    return min(steps * schedule.cohort_size * group, waiting)


def identity(recipe: Recipe, tokenizer: object) -> checkpoint.Manifest:
    """What all versions of the run share: run, tokenizer, chat template."""
    files = sorted(Path(recipe.model.path).glob("*token*"))
    hasher = blake3()
    for file in files:
        hasher.update(file.name.encode()).update(file.read_bytes())
    template = getattr(tokenizer, "chat_template", None)
    return checkpoint.Manifest(
        run_id=recipe.run_id,
        kind=checkpoint.WEIGHTS_KIND_FULL
        if recipe.learner.lora is None
        else checkpoint.WEIGHTS_KIND_ADAPTER,
        tokenizer_hash=hasher.digest(),
        chat_template_hash=blake3(str(template).encode()).digest() if template else b"",
    )
