"""The paper's recipes on small local data and models of the same form: prompts as the policy gets them, rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from offbeat.config import Recipe, load_recipe
from offbeat.streams.columns import decode_columns
from services.learner.data.dataset import Dataset, load_dataset
from services.learner.evaluation import Evaluator
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions import load_functions
from services.reward.records import Sample
from tests.harness import paper_fixtures as fixtures
from tests.harness.judge_server import judge_server, reply
from tests.harness.paper_fixtures import EOS

RECIPES = Path(__file__).parents[3] / "recipes" / "paper"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def recipe_on(name: str, repository: Path, models: Sequence[Path | None], *sets: str) -> Recipe:
    """The recipe with a local data set, and local models: the policy's, then one for each reward function."""
    policy, *others = models
    overrides = ["run.id=test", f"model.path={policy}"]
    for split in ("train", "heldout"):
        overrides += [f"data.{split}.path={repository}", f"data.{split}.name=null"]
    for index, model in enumerate(others):
        if model is not None:
            parts = f"reward.functions.{index}.params"
            overrides += [f"{parts}.path={model}", f"{parts}.dtype=float32", f"{parts}.device=cpu"]
    return load_recipe(RECIPES / f"{name}.yaml", [*overrides, *sets])


async def score(recipe: Recipe, samples: Sequence[Sample]) -> list[Any]:
    scorer = Scorer(load_functions(recipe.reward.functions), 60.0, Counters())
    try:
        return await scorer.score(samples)
    finally:
        await scorer.close()


def values(result: Any) -> dict[str, float]:
    return {c.name: c.value for c in result.components if c.HasField("value")}


def sample(prompt: Any, completion: str, *, end: bool = True, **fields: Any) -> Sample:
    """A completion as a rollout has it: the end-of-sequence token is in the ids, not in the text."""
    ids = fixtures.byte_tokenizer()(completion)["input_ids"] + ([0] if end else [])
    return Sample(
        prompt=prompt.text,
        completion=completion,
        columns=decode_columns(prompt.columns),
        completion_token_ids=ids,
        finish_reason="stop" if end else "length",
        **fields,
    )


@torch.no_grad()
def logit(model: Any, text: str) -> float:
    """One text, no batch, no padding: the score at its last token."""
    ids = torch.tensor([fixtures.byte_tokenizer()(text, add_special_tokens=False)["input_ids"]])
    return float(model(input_ids=ids).logits[0, 0])


def texts(dataset: Dataset) -> list[str]:
    return [prompt.text for prompt in dataset.train.all]


async def test_tldr(tmp_path: Path) -> None:
    """The recipes of the other sizes differ from this one in names and memory alone; another test sees to that."""
    data = fixtures.tldr_repository(tmp_path / "data")
    policy = fixtures.pythia(tmp_path / "policy", seed=1)
    proxy = fixtures.pythia(tmp_path / "proxy", seed=2, reward=True)
    gold = fixtures.pythia(tmp_path / "gold", seed=3, reward=True)
    folders = [tmp_path / name for name in ("policy", "proxy", "gold", "policy")]
    recipe = recipe_on(
        "tldr_pythia_410m", data, [folders[0], folders[1], None, folders[2], folders[3]]
    )
    dataset = load_dataset(recipe)

    query = "SUBREDDIT: r/{}\n\nTITLE: {}\n\nPOST: {}\n\nTL;DR:"
    assert texts(dataset) == [query.format(*post[:3]) for post in fixtures.TLDR_POSTS[1:3]]
    assert [counts.too_long for counts in dataset.counts] == [1, 1]  # of more than 512 tokens
    first, held = dataset.train.all[0], dataset.heldout[0]
    assert first.token_ids == fixtures.byte_tokenizer()(first.text)["input_ids"]
    reference = f" {fixtures.TLDR_POSTS[0][3]}{EOS}"
    assert decode_columns(held.columns) == {"reference_response": reference}
    [task] = Evaluator(recipe, dataset.heldout).start(step=0, version=1, term=1, whole=True)
    assert (task.sampling.max_tokens, task.sampling.temperature, task.k) == (128, 0.0, 1)

    trained = await score(
        recipe, [sample(first, " They never do."), sample(first, " No end", end=False)]
    )
    assert trained[0].total == pytest.approx(
        logit(proxy, first.text + " They never do." + EOS), abs=1e-4
    )
    assert trained[1].total == -1.0
    assert values(trained[0]).keys() == {"reward_model"}

    answers = [" Keys.", " I left my keys at home and then it rained", reference.removesuffix(EOS)]
    judged = await score(recipe, [sample(held, text, evaluation=True) for text in answers])
    of_reference = logit(gold, held.text + reference)
    expected = [float(logit(gold, held.text + text + EOS) > of_reference) for text in answers]
    found = [values(result)["reward_model_win"] for result in judged]
    assert found == expected
    assert found[2] == 0.0  # equal is no win
    whole = torch.tensor([[*held.token_ids, *sample(held, answers[0]).completion_token_ids]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            policy(whole).logits[0, len(held.token_ids) - 1 : -1].double(),
            whole[0, len(held.token_ids) :],
            reduction="sum",
        )
    assert values(judged[0])["perplexity"] == pytest.approx(
        float(torch.exp(loss / whole.shape[1])), rel=1e-4
    )


async def test_no_robots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fixtures.no_robots_repository(tmp_path / "data")
    fixtures.llama(tmp_path / "policy", seed=1)
    proxy = fixtures.llama(tmp_path / "proxy", seed=2, reward=True)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0")

    async def prefers_short(_: web.Request, body: dict[str, Any]) -> web.Response:
        asked = body["messages"][-1]["content"]
        answer = asked.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
        better = int(len(answer[0]) < len(answer[1].split("\n\nWhich answer")[0]))
        return reply(json.dumps({"reason": "shorter", "a_is_better": better}))

    async with judge_server() as server:
        server.answer = prefers_short
        recipe = recipe_on(
            "no_robots_llama31_8b",
            data,
            [tmp_path / "policy", tmp_path / "proxy"],
            f"reward.functions.2.params.base_url={server.url}",
        )
        dataset = load_dataset(recipe)
        assert texts(dataset) == [
            "<|system|>\nYou are curt.\n<|user|>\nHello?\n<|assistant|>\n"
            f"Yes.{EOS}\n<|user|>\nWho are you?\n<|assistant|>\n"
        ]
        first, held = dataset.train.all[0], dataset.heldout[0]
        assert held.text == "<|user|>\nName a river.\n<|assistant|>\n"
        assert decode_columns(held.columns) == {"reference": "The Danube."}
        results = await score(
            recipe,
            [
                sample(first, "Nobody."),
                sample(first, "and on", end=False),
                sample(held, "Rhine.", evaluation=True),
                sample(held, "The long river Rhine.", evaluation=True),
            ],
        )
        assert len(server.requests) == 2
    assert results[0].total == pytest.approx(logit(proxy, first.text + "Nobody." + EOS), abs=1e-4)
    assert results[1].total == -10.0
    assert [values(result)["judge"] for result in results[2:]] == [1.0, 0.0]
    assert "judge" not in values(results[0])


async def test_gsm8k(tmp_path: Path) -> None:
    data = fixtures.gsm8k_repository(tmp_path / "data")
    fixtures.llama(tmp_path / "policy", seed=1)
    recipe = recipe_on("gsm8k_rho_1b", data, [tmp_path / "policy", None, None, tmp_path / "policy"])
    dataset = load_dataset(recipe)
    question = fixtures.PROBLEMS[1][0]
    assert texts(dataset) == [f"[MATH_TASK] Problem:\n{question}\n\nSolution:"]
    first, held = dataset.train.all[0], dataset.heldout[0]
    assert decode_columns(first.columns) == {"answer": fixtures.PROBLEMS[1][1]}
    answers = ["900+250=1150\n#### 1150", "#### 1,150", "1150", "#### 1151", "#### 1150 or so"]
    results = await score(recipe, [sample(first, text, end=False) for text in answers])
    assert [result.total for result in results] == [1.0, 1.0, 0.0, 0.0, 1.0]
    judged = await score(
        recipe,
        [sample(held, text, evaluation=True) for text in ("so 12", "#### 12", "12 or 13")],
    )
    assert [result.total for result in judged] == [0.0, 1.0, 0.0]
    assert [values(result)["math"] for result in judged] == [1.0, 1.0, 0.0]
    assert all(values(result)["perplexity"] > 1 for result in judged)
