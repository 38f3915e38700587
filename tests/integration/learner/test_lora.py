"""LoRA: only the adapter is trained, saved and sent, and what PEFT makes of it is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.config import Recipe
from offbeat.errors import ModelError
from services.learner import lora, state
from services.learner.model import load_policy
from services.learner.trainer import Trainer
from tests.harness.training import Ranks, make_policy, make_recipe, recorded_groups, run_job

DPO = {"name": "online_dpo"}
RLOO = {"name": "rloo"}
LORA = {"r": 4}
SEQUENCES = [[5, 6, 7, 9, 11], [8, 9]]

Weights = dict[str, torch.Tensor]


def recipe_of(policy: Path, loss: dict[str, Any] = DPO, **learner: Any) -> Recipe:
    return make_recipe(policy, loss=loss, **({"lora": LORA} | learner))


def train(recipe: Recipe, steps: range = range(3), **job: Any) -> Any:
    snapshot, _ = run_job({"recipe": recipe.model_dump(), "steps": list(steps), **job})
    return snapshot


def distance(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max(float((left[k].float() - right[k].float()).abs().max()) for k in left)


def logprobs(model: Any, sequence: list[int]) -> list[float]:
    tokens = torch.tensor([sequence])
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1)
    return scores.gather(-1, tokens[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_is_sent_is_the_adapter_and_peft_reads_it_back(tmp_path: Path, tied: bool) -> None:
    import peft

    policy = make_policy(tmp_path / "policy", tied=tied)
    trainer = Trainer(recipe_of(policy))
    try:
        start = trainer.snapshot(SEQUENCES)
        for step in range(2):
            trainer.train_step(recorded_groups(step))
        snapshot = trainer.snapshot(SEQUENCES)
        trainer.export(tmp_path / "export")
    finally:
        trainer.close()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in snapshot.tensors)
    base = load_policy(policy).eval()
    sent = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    assert sent < sum(p.nbytes for p in base.parameters())
    # A new adapter changes nothing; a step moves it.
    for tokens, scores in start.parity:
        assert scores == pytest.approx(logprobs(base, tokens), abs=1e-5)
    assert distance(start.tensors, snapshot.tensors) > 1e-4
    assert start.adapter_config == snapshot.adapter_config
    whole = load_policy(tmp_path / "export").eval()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for tokens, scores in snapshot.parity:
        assert scores == pytest.approx(logprobs(whole, tokens), abs=1e-5)
        assert scores == pytest.approx(logprobs(adapted, tokens), abs=1e-5)


@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_stages_and_gradient_checkpointing_train_the_same_adapter(policy: Path, stage: int) -> None:
    cut = {"batching": {"micro_batch_tokens": 300, "mini_batches": 2}}
    expected = train(recipe_of(policy, RLOO, **cut))
    found = train(recipe_of(policy, RLOO, **cut, zero_stage=stage, gradient_checkpointing=True))
    assert distance(found.tensors, expected.tensors) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_the_adapter_of_one(policy: Path, ranks: Ranks, stage: int) -> None:
    recipe = recipe_of(policy, zero_stage=stage, batching={"micro_batch_tokens": 150})
    expected = train(recipe, range(2))
    weights, _ = ranks.run(recipe, steps=[0, 1])
    assert distance(weights, expected.tensors) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_as_if_nothing_was(
    policy: Path, tmp_path: Path, dtype: str
) -> None:
    recipe = recipe_of(policy, RLOO, dtype=dtype)
    train(recipe, range(2), save=str(tmp_path / "saved"))
    resumed = train(recipe, range(2, 4), load=str(tmp_path / "saved"))
    whole = train(recipe, range(4))
    assert distance(resumed.tensors, whole.tensors) == 0.0
    parameters = sum(tensor.numel() for tensor in whole.tensors.values())
    size = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert size < 3 * 4 * parameters + 40_000, "master copy and two moments, names, random state"
    with state.masters(tmp_path / "saved") as master:
        assert master("model.layers.0.mlp.up_proj.lora_A.default.weight").shape == (4, 32)


# ---- a start from an adapter


@pytest.fixture(scope="module")
def adapter(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was trained before, with settings of its own."""
    folder = tmp_path_factory.mktemp("adapter")
    modules = {"target_modules": ["q_proj", "up_proj"], "r": 2, "alpha": 6}
    snapshot = train(recipe_of(policy, lora=modules, optimizer={"lr": 1e-2}))
    lora.write_adapter(snapshot.tensors, snapshot.adapter_config, folder)
    return folder


@pytest.mark.parametrize("stage", [0, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_reference_is_the_adapter_that_the_run_started_from(
    policy: Path, adapter: Path, stage: int
) -> None:
    recipe = recipe_of(policy, RLOO, lora={"adapter": str(adapter)}, zero_stage=stage)
    trainer = Trainer(recipe)
    try:
        start = trainer.snapshot(SEQUENCES)
        base = load_policy(policy).eval()
        assert abs(start.parity[0][1][0] - logprobs(base, SEQUENCES[0])[0]) > 1e-4
        first, second = (trainer.train_step(recorded_groups(step)) for step in (0, 0))
    finally:
        trainer.close()
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(second["kl"]) > 1e-4
    assert {tuple(t.shape) for t in start.tensors.values()} == {(2, 32), (32, 2), (64, 2)}


def test_an_adapter_start_resumes_with_the_same_reference(
    policy: Path, adapter: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(policy, RLOO, lora={"adapter": str(adapter)})
    train(recipe, range(2), save=str(tmp_path / "saved"))
    resumed = train(recipe, range(2, 4), load=str(tmp_path / "saved"))
    assert distance(resumed.tensors, train(recipe, range(4)).tensors) == 0.0


def test_adapters_that_can_not_be_trained_are_refused(
    policy: Path, adapter: Path, tmp_path: Path
) -> None:
    config = (adapter / lora.CONFIG_FILE).read_text()
    weights = (adapter / lora.WEIGHTS_FILE).read_bytes()
    cases = {
        "use_dora": (config.replace('"use_dora": false', '"use_dora": true'), weights),
        "peft_type": (config.replace('"peft_type": "LORA"', '"peft_type": "IA3"'), weights),
        "missing": (config.replace('"up_proj"', '"down_proj"'), weights),
        "safetensors": (config, None),
    }
    for name, (text, data) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / lora.CONFIG_FILE).write_text(text)
        if data is not None:
            (folder / lora.WEIGHTS_FILE).write_bytes(data)
        with pytest.raises(ModelError, match=name):
            Trainer(recipe_of(policy, lora={"adapter": str(folder)}))
    with pytest.raises(ModelError, match="linear layers"):
        Trainer(recipe_of(policy, lora={"target_modules": ["embed_tokens"]}))
    with pytest.raises(ModelError, match="can't take an adapter"):
        Trainer(recipe_of(policy, lora={"target_modules": ["no_such_layer"]}))
