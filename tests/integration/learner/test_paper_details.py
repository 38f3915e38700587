"""Details of arXiv 2410.18252 on which losses silently differ: padding with the end token, the log-probs' temperature.

Expected values are computed apart from the trainer: each completion alone, without padding, through `transformers`,
then the formulas of `tests.harness.loss_references`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.learner.batching import Group, Sample
from services.learner.trainer import Trainer
from tests.harness import loss_references
from tests.harness.loss_references import Completion
from tests.harness.training import make_recipe, recorded_groups

EOS = 2
SAMPLING_TEMPERATURE = 0.8
PADDED = {"micro_batch_tokens": 300, "bucket_by_length": False}
DPO = {"name": "online_dpo", "beta": 0.1}


def groups_with_ends(step: int) -> list[Group]:
    """Recorded groups of which every second completion ends with EOS; prompts have one inside, as chat prompts do."""
    groups = []
    for group in recorded_groups(step):
        samples = tuple(
            replace(sample, token_ids=np.append(sample.token_ids[:-1], EOS).astype(np.int32))
            if place % 2
            else sample
            for place, sample in enumerate(group.completions)
        )
        samples = tuple(
            replace(s, has_eos=bool(s.token_ids[-1] == EOS), reward=s.reward + place / 8)
            for place, s in enumerate(samples)
        )
        prompt = np.concatenate([[5, EOS], group.prompt_token_ids]).astype(np.int32)
        groups.append(replace(group, prompt_token_ids=prompt, completions=samples))
    return groups


def with_pad(policy: Path, pad: int | None, folder: Path) -> Path:
    """The policy with another pad token in its configuration."""
    shutil.copytree(policy, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"pad_token_id": pad}))
    return folder


def logprobs(model: Any, group: Group, sample: Sample, temperature: float) -> list[float]:
    """Of the trained tokens of one completion, in float64."""
    first = len(group.prompt_token_ids)
    tokens = torch.tensor([[*group.prompt_token_ids, *sample.token_ids]]).long()
    with torch.no_grad():
        logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits[0, first - 1 : -1]
    rows = torch.log_softmax(logits.double() / temperature, -1)
    picked = rows.gather(-1, tokens[0, first:, None])[:, 0]
    mask = np.ones(len(picked), bool) if sample.loss_mask is None else sample.loss_mask
    return picked[torch.from_numpy(mask)].tolist()


def expected(
    loss: dict[str, Any], models: tuple[Any, Any], groups: list[Group], temperature: float
) -> tuple[float, float]:
    """(loss, KL over all completions) of a policy and its reference, from the formulas."""
    made = []
    for group in groups:
        completions = []
        for sample in group.completions:
            policy, reference = (logprobs(m, group, sample, temperature) for m in models)
            length = len(sample.token_ids)
            given = {"pi": policy, "held": policy, "old": policy, "mu": policy, "ref": reference}
            completions.append(Completion(sample.reward, length, **given))
        made.append(completions)
    formula = getattr(loss_references, loss["name"])
    kl = np.mean([sum(c.pi) - sum(c.ref) for group in made for c in group])
    return formula(made, loss), float(kl)


def second_step(
    policy: Path, folder: Path, loss: dict[str, Any], **learner: Any
) -> tuple[dict[str, float], tuple[Any, Any], list[Group]]:
    """Metrics of a trainer's second step, (policy at its start, reference), and the groups that it trained."""
    trainer = Trainer(make_recipe(policy, loss=loss, batching=PADDED, **learner))
    try:
        trainer.train_step(groups_with_ends(0))
        trainer.export(folder / "export")
        groups = groups_with_ends(1)
        metrics = trainer.train_step(groups)
    finally:
        trainer.close()
    models = [AutoModelForCausalLM.from_pretrained(p).eval() for p in (folder / "export", policy)]
    return metrics, (models[0], models[1]), groups


# ---- the pad token is the end token


@pytest.mark.parametrize(
    "loss",
    [DPO, {"name": "ppo"}, {"name": "ppo", "critic": "shared_head"}],
    ids=["online_dpo", "ppo", "ppo-shared"],
)
def test_the_pad_token_changes_nothing(policy: Path, tmp_path: Path, loss: dict[str, Any]) -> None:
    found = []
    for pad in (0, EOS, None):
        folder = with_pad(policy, pad, tmp_path / str(pad))
        trainer = Trainer(make_recipe(folder, loss=loss, batching=PADDED))
        try:
            metrics = [trainer.train_step(groups_with_ends(step)) for step in range(2)][1]
            tensors = trainer.snapshot().tensors
        finally:
            trainer.close()
        found.append((tensors, {k: v for k, v in metrics.items() if not k.startswith("time/")}))
    (tensors, metrics), *others = found
    assert metrics["eos_rate"] == 0.5
    for other_tensors, other_metrics in others:
        assert other_metrics == metrics
        assert other_tensors.keys() == tensors.keys()
        assert all(torch.equal(other_tensors[name], tensors[name]) for name in tensors)


def test_an_end_token_is_trained_and_attended_where_it_is_the_pad_token(
    policy: Path, tmp_path: Path
) -> None:
    folder = with_pad(policy, EOS, tmp_path / "policy")
    metrics, models, groups = second_step(folder, tmp_path, DPO)
    whole, _ = expected(DPO, models, groups, SAMPLING_TEMPERATURE)
    assert metrics["loss"] == pytest.approx(whole, rel=1e-5)
    # The two ways in which implementations lose it.
    untrained = [
        replace(
            group,
            completions=tuple(
                replace(
                    s,
                    loss_mask=(s.loss_mask if s.loss_mask is not None else True)
                    & (s.token_ids != EOS),
                )
                for s in group.completions
            ),
        )
        for group in groups
    ]
    unattended = [
        replace(group, prompt_token_ids=group.prompt_token_ids[group.prompt_token_ids != EOS])
        for group in groups
    ]
    for lost in (untrained, unattended):
        other, _ = expected(DPO, models, lost, SAMPLING_TEMPERATURE)
        assert abs(other - whole) > 1e-3


# ---- the temperature of the log-probs


@pytest.mark.parametrize(
    ("loss", "temperature"),
    [
        (DPO, None),
        (DPO, 1.0),
        (DPO, 0.5),
        ({"name": "ipo", "beta": 0.1}, 1.0),
        ({"name": "copg", "beta": 0.1}, 1.0),
        ({"name": "vargrad", "beta": 0.5}, 1.0),
        ({"name": "best_of_n"}, 1.0),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_the_temperature_scales_policy_and_reference(
    policy: Path, tmp_path: Path, loss: dict[str, Any], temperature: float | None
) -> None:
    metrics, models, groups = second_step(policy, tmp_path, loss, logprob_temperature=temperature)
    value, kl = expected(loss, models, groups, temperature or SAMPLING_TEMPERATURE)
    assert metrics["loss"] == pytest.approx(value, rel=1e-5)
    if loss["name"] in {"copg", "vargrad"}:  # which run every completion through the model
        assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    if loss["name"] != "best_of_n":
        # Scaling one of the two alone is another loss.
        policy_alone, _ = expected(loss, (models[0], models[1]), groups, 0.3)
        assert abs(policy_alone - value) > 1e-4


def test_the_gradient_is_that_at_the_temperature(policy: Path) -> None:
    """Of online DPO at the start, where policy and reference agree: half of beta times the difference's gradient."""
    norms = {}
    for temperature in (0.5, 1.0):
        groups = groups_with_ends(0)
        trainer = Trainer(make_recipe(policy, loss=DPO, logprob_temperature=temperature))
        try:
            norms[temperature] = trainer.train_step(groups)["grad_norm"]
        finally:
            trainer.close()
        model = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager").eval()
        margin = torch.zeros(())
        for group in groups:
            rewards = [sample.reward for sample in group.completions]
            best, worst = (group.completions[rewards.index(f(rewards))] for f in (max, min))
            margin = margin + sum_of(model, group, best, temperature)
            margin = margin - sum_of(model, group, worst, temperature)
        (-0.5 * DPO["beta"] * margin / len(groups)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert norms[temperature] == pytest.approx(
            float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-4
        )
    assert norms[0.5] > 1.2 * norms[1.0]


def sum_of(model: Any, group: Group, sample: Sample, temperature: float) -> torch.Tensor:
    """Sum of the log-probs of a completion's trained tokens, with gradient."""
    first = len(group.prompt_token_ids)
    tokens = torch.tensor([[*group.prompt_token_ids, *sample.token_ids]]).long()
    rows = torch.log_softmax(model(tokens).logits[0, first - 1 : -1] / temperature, -1)
    picked = rows.gather(-1, tokens[0, first:, None])[:, 0]
    if sample.loss_mask is not None:
        picked = picked[torch.from_numpy(sample.loss_mask)]
    return picked.sum()
