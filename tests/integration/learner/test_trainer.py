"""The trainer on a tiny policy: how a step is cut never changes the weights, and nothing is lost on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.errors import CheckpointError, ConfigError, DataError, ModelError
from services.learner.model import check_model, load_policy, load_tokenizer
from services.learner.trainer import Trainer
from tests.harness.training import (
    CONTEXT,
    Ranks,
    make_policy,
    make_recipe,
    recorded_groups,
    run_job,
)

DPO = {"name": "online_dpo"}
RLOO = {"name": "rloo"}
PROXIMAL = {"name": "proximal_rloo"}
# Three micro-batchings: all at once; a few units; units larger than a micro-batch.
CUTS = [
    {"micro_batch_tokens": 100_000},
    {"micro_batch_tokens": 200, "bucket_by_length": False},
    {"micro_batch_tokens": 60},
]

Weights = dict[str, torch.Tensor]


def train(policy: Path, loss: dict[str, Any], steps: range = range(3), **learner: Any) -> Weights:
    recipe = make_recipe(policy, loss=loss, **learner)
    snapshot, _ = run_job({"recipe": recipe.model_dump(), "steps": list(steps)})
    return snapshot.tensors


def distance(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max(
        float((left[k].detach().float() - right[k].detach().float()).abs().max()) for k in left
    )


@pytest.mark.parametrize("loss", [DPO, RLOO, PROXIMAL], ids=lambda loss: loss["name"])
def test_weights_do_not_depend_on_micro_batches(policy: Path, loss: dict[str, Any]) -> None:
    updates = {"mini_batches": 1 if loss is RLOO else 2}
    whole, *others = (train(policy, loss, batching={**cut, **updates}) for cut in CUTS)
    start = dict(load_policy(policy).named_parameters())
    assert distance(whole, start) > 1e-3
    for other in others:
        assert distance(whole, other) < 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_checkpointing_changes_nothing(policy: Path, stage: int) -> None:
    settings = {"zero_stage": stage, "batching": {"micro_batch_tokens": 300}}
    expected = train(policy, DPO, range(2), **settings)
    found = train(policy, DPO, range(2), gradient_checkpointing=True, **settings)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_do_not_depend_on_the_zero_stage(policy: Path, stage: int) -> None:
    settings = {"batching": {"mini_batches": 2, "micro_batch_tokens": 300}}
    expected = train(policy, PROXIMAL, **settings)
    assert distance(train(policy, PROXIMAL, zero_stage=stage, **settings), expected) < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_the_weights_of_one(policy: Path, ranks: Ranks, stage: int) -> None:
    recipe = make_recipe(policy, loss=DPO, zero_stage=stage, batching={"micro_batch_tokens": 150})
    expected, metrics = run_job({"recipe": recipe.model_dump(), "steps": [0, 1]})
    weights, of_ranks = ranks.run(recipe, steps=[0, 1])
    assert distance(weights, expected.tensors) < 1e-5
    comparable = [name for name in metrics if not name.startswith("time/")]
    assert set(of_ranks) == set(metrics)
    np.testing.assert_allclose(
        [of_ranks[name] for name in comparable], [metrics[name] for name in comparable], atol=1e-4
    )


def test_statistics_over_the_step_are_those_of_one_rank(policy: Path, ranks: Ranks) -> None:
    """M2PO's mask over an update, whitening over the step, the KL of the whole step in the rewards."""
    loss = {"name": "m2po", "m2_threshold": 0.5, "whiten_advantages": True, "kl_coef": 0.1}
    recipe = make_recipe(
        policy, loss=loss | {"kl_in": "reward"}, batching={"micro_batch_tokens": 150}, zero_stage=2
    )
    expected, metrics = run_job({"recipe": recipe.model_dump(), "steps": [0, 1]})
    weights, of_ranks = ranks.run(recipe, steps=[0, 1])
    assert distance(weights, expected.tensors) < 1e-5
    assert of_ranks["advantage/std"] == pytest.approx(metrics["advantage/std"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loss", [DPO, PROXIMAL], ids=lambda loss: loss["name"])
@pytest.mark.parametrize("cut", CUTS[1:], ids=["few", "apart"])
def test_ten_steps_agree_over_ranks_and_stages(
    policy: Path, ranks: Ranks, stage: int, loss: dict[str, Any], cut: dict[str, Any]
) -> None:
    steps = list(range(10))
    expected = train(policy, loss, range(10), batching={**CUTS[0], "passes": 2})
    recipe = make_recipe(policy, loss=loss, zero_stage=stage, batching={**cut, "passes": 2})
    weights, _ = ranks.run(recipe, steps=steps)
    assert distance(weights, expected) < 1e-4


def test_fewer_groups_than_ranks_and_mini_batches_train(policy: Path, ranks: Ranks) -> None:
    recipe = make_recipe(policy, loss=PROXIMAL, zero_stage=0, batching={"mini_batches": 3})
    job = {"recipe": recipe.model_dump(), "steps": [0], "count": 1}
    expected, _ = run_job(job)
    weights, _ = ranks.run(recipe, steps=[0], count=1)
    assert distance(weights, expected.tensors) < 1e-5


# ---- a trainer at hand


@pytest.fixture
def trainer(policy: Path) -> Iterator[Trainer]:
    made = Trainer(make_recipe(policy, loss=DPO))
    yield made
    made.close()


def behaviour_of(trainer: Trainer, step: int) -> Any:
    """The recorded groups with log-probs of the trainer's own policy at the sampling temperature."""
    model, temperature = trainer._engine.scorer.model, 0.8
    groups = []
    for group in recorded_groups(step):
        samples = []
        for sample in group.completions:
            tokens = torch.tensor([[*group.prompt_token_ids, *sample.token_ids]]).long()
            with torch.no_grad():
                logits = model(tokens).logits[0, len(group.prompt_token_ids) - 1 : -1].double()
            rows = torch.log_softmax(logits / temperature, -1)
            picked = rows[range(len(rows)), torch.from_numpy(sample.token_ids).long()]
            samples.append(replace(sample, behaviour_logprobs=picked.float().numpy(), lag=0))
        groups.append(replace(group, completions=tuple(samples)))
    return groups


def test_on_policy_logprobs_agree_and_metrics_say_so(trainer: Trainer) -> None:
    groups = behaviour_of(trainer, 0)
    differ = [len({sample.reward for sample in group.completions}) > 1 for group in groups]
    informative = pytest.approx(sum(differ) / len(differ))
    metrics = trainer.train_step(groups)
    assert metrics["logprob_diff/max"] < 1e-4
    assert abs(metrics["mismatch_kl"]) < 1e-6
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["informative_fraction"] == informative
    assert metrics["learning_rate"] == pytest.approx(1e-3)
    assert metrics["grad_norm"] > 0
    assert trainer.updates == 1
    later = trainer.train_step(behaviour_of(trainer, 1))
    assert later["kl"] != 0
    assert later["logprob_diff/max"] < 1e-4


def test_an_uninformative_group_counts_in_the_denominator(trainer: Trainer, policy: Path) -> None:
    """Two informative groups beside none, and beside two uninformative ones: half the gradient."""
    groups = recorded_groups(3, count=6)
    informative = [g for g in groups if len({s.reward for s in g.completions}) > 1][:2]
    equal = [
        replace(
            group,
            ordinal=100 + group.ordinal,
            completions=tuple(replace(s, reward=2.0) for s in group.completions),
        )
        for group in informative
    ]
    alone = trainer.train_step(informative)
    other = Trainer(make_recipe(policy, loss=DPO))
    diluted = other.train_step([*equal, *informative])
    other.close()
    assert diluted["grad_norm"] == pytest.approx(alone["grad_norm"] / 2, rel=1e-4)
    assert diluted["loss"] == pytest.approx(alone["loss"] / 2, rel=1e-4)
    assert (alone["informative_fraction"], diluted["informative_fraction"]) == (1.0, 0.5)


def test_a_step_without_groups_changes_nothing_but_the_schedule(trainer: Trainer) -> None:
    before = trainer.snapshot().tensors
    metrics = trainer.train_step([])
    assert distance(before, trainer.snapshot().tensors) == 0
    assert trainer.updates == 1
    assert "loss" not in metrics


def test_a_sample_that_does_not_fit_the_context_is_refused(trainer: Trainer) -> None:
    group = recorded_groups(0)[0]
    long = replace(group, prompt_token_ids=np.ones(CONTEXT, np.int32))
    with pytest.raises(DataError, match="max_context"):
        trainer.train_step([long])


def test_reference_logprobs_that_come_along_are_used(policy: Path, trainer: Trainer) -> None:
    groups = recorded_groups(0)
    shifted = [
        replace(
            group,
            completions=tuple(
                replace(s, reference_logprobs=s.behaviour_logprobs) for s in group.completions
            ),
        )
        for group in groups
    ]
    metrics = trainer.train_step(shifted)
    assert abs(metrics["kl"]) > 0.1


def test_behaviour_logprobs_as_old_ones_change_the_ratio(policy: Path) -> None:
    cuts = {"batching": {"mini_batches": 2}}
    recomputed = train(policy, PROXIMAL, **cuts)
    assert distance(train(policy, PROXIMAL, old_logprobs="behaviour", **cuts), recomputed) > 1e-4


# ---- snapshots, exports, checkpoints


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_in_transformers_with_equal_logprobs(tmp_path: Path, tied: bool) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    policy = make_policy(tmp_path / "policy", tied=tied)
    trainer = Trainer(make_recipe(policy, loss=DPO))
    trainer.train_step(recorded_groups(0))
    sequences = [[9, 3], [4], [5, 6, 7, 8], [5] * 40]
    snapshot = trainer.snapshot(sequences)
    trainer.export(tmp_path / "export")
    trainer.close()
    assert ("lm_head.weight" in snapshot.tensors) is not tied
    original = load_file(policy / "model.safetensors")
    assert {k: v.shape for k, v in original.items()} == {
        k: v.shape for k, v in snapshot.tensors.items()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for sequence, logprobs in snapshot.parity:
        tokens = torch.tensor([sequence])
        rows = torch.log_softmax(model(tokens).logits[0].detach().double(), -1)
        expected = [float(rows[i, token]) for i, token in enumerate(sequence[1:])]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["attention_dropout"] == 0.1, (
        "training without dropout is no property of the model"
    )


def test_a_snapshot_owns_its_tensors_and_hands_out_their_bytes(trainer: Trainer) -> None:
    snapshot = trainer.snapshot()
    before = {name: bytes(payload) for name, _, _, payload in snapshot.raw()}
    trainer.train_step(recorded_groups(0))
    assert before == {name: bytes(payload) for name, _, _, payload in snapshot.raw()}
    after = {name: bytes(payload) for name, _, _, payload in trainer.snapshot().raw()}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_bfloat16_weights_have_a_float32_master(policy: Path, tmp_path: Path) -> None:
    """Steps far below bfloat16's resolution add up, and survive a checkpoint."""
    slow = {"lr": 1e-5, "schedule": "constant"}
    recipe = make_recipe(policy, loss=DPO, dtype="bfloat16", optimizer=slow)
    steps = list(range(4))
    job = {"recipe": recipe.model_dump(), "steps": steps}
    whole, _ = run_job(job)
    run_job({**job, "steps": steps[:2], "save": tmp_path / "half"})
    resumed, _ = run_job({**job, "steps": steps[2:], "load": tmp_path / "half"})
    assert distance(whole.tensors, resumed.tensors) == 0
    assert {t.dtype for t in whole.tensors.values()} == {torch.bfloat16}
    assert {dtype for _, dtype, _, _ in whole.raw()} == {"bfloat16"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_is_bit_equal(policy: Path, tmp_path: Path, stage: int) -> None:
    recipe = make_recipe(policy, loss=DPO, zero_stage=stage, optimizer={"lr": 1e-3})
    job = {"recipe": recipe.model_dump()}
    whole, metrics = run_job({**job, "steps": [0, 1, 2]})
    run_job({**job, "steps": [0, 1], "save": tmp_path / "state"})
    resumed, again = run_job({**job, "steps": [2], "load": tmp_path / "state"})
    assert distance(whole.tensors, resumed.tensors) == 0
    assert again["learning_rate"] == metrics["learning_rate"]
    assert again["loss"] == metrics["loss"]


def test_a_run_saved_before_its_first_update_resumes(policy: Path, tmp_path: Path) -> None:
    job = {"recipe": make_recipe(policy, loss=DPO).model_dump()}
    whole, _ = run_job({**job, "steps": [0]})
    run_job({**job, "steps": [], "save": tmp_path / "state"})
    resumed, _ = run_job({**job, "steps": [0], "load": tmp_path / "state"})
    assert distance(whole.tensors, resumed.tensors) == 0


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_back(
    policy: Path, ranks: Ranks, tmp_path: Path
) -> None:
    two = make_recipe(policy, loss=PROXIMAL, zero_stage=2)
    one = make_recipe(policy, loss=PROXIMAL, zero_stage=3)
    expected = train(policy, PROXIMAL, range(3))
    ranks.run(two, steps=[0], save=str(tmp_path / "first"))
    job = {"recipe": one.model_dump(), "load": tmp_path / "first", "save": tmp_path / "second"}
    run_job({**job, "steps": [1]})
    weights, _ = ranks.run(two, steps=[2], load=str(tmp_path / "second"))
    assert distance(weights, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_resume_bit_equal(policy: Path, ranks: Ranks, tmp_path: Path, stage: int) -> None:
    recipe = make_recipe(policy, loss=DPO, zero_stage=stage)
    whole, _ = ranks.run(recipe, steps=[0, 1, 2])
    ranks.run(recipe, steps=[0, 1], save=str(tmp_path / "state"))
    resumed, _ = ranks.run(recipe, steps=[2], load=str(tmp_path / "state"))
    assert distance(whole, resumed) == 0


def test_state_that_does_not_fit_is_refused(trainer: Trainer, policy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't read the training state"):
        trainer.load(tmp_path / "nowhere")
    trainer.train_step(recorded_groups(0))
    state = tmp_path / "state"
    trainer.save(state)
    other = Trainer(make_recipe(make_policy(tmp_path / "untied", tied=False), loss=DPO))
    with pytest.raises(CheckpointError, match=r"another model.*lm_head"):
        other.load(state)
    other.close()
    shard = state / "state-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="state-00000"):
        trainer.load(state)


def test_state_that_can_not_be_written_is_an_error_and_training_goes_on(
    trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="can't write"):
        trainer.save(tmp_path / "taken")
    trainer.train_step(recorded_groups(0))
    trainer.save(tmp_path / "free")
    assert (tmp_path / "free" / "trainer.json").exists()


# ---- model folders


def test_a_missing_or_broken_model_folder_is_one_clear_error(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a model folder at .*/nowhere, found nothing"):
        check_model(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(empty)
    (empty / "config.json").write_text((policy / "config.json").read_text())
    with pytest.raises(ModelError, match="expected weights"):
        check_model(empty)
    (empty / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="causal language model"):
        check_model(empty)
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(policy)


def test_weights_that_are_not_all_there_are_refused(policy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(policy / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((policy / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_policy(tmp_path)


def test_more_context_than_positions_is_refused(policy: Path) -> None:
    info = check_model(policy, max_context=CONTEXT)
    assert (info.context, info.vocabulary, info.tied_embeddings) == (CONTEXT, 48, True)
    with pytest.raises(ConfigError, match=f"at most {CONTEXT}"):
        check_model(policy, max_context=CONTEXT + 1)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="end-of-sequence"):
        load_tokenizer(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_id == 1
