"""Recipes: what is allowed is loaded as written, everything else is one clear error."""

from pathlib import Path

import pytest
import yaml

from offbeat.config.load import dump_recipe, load_recipe
from offbeat.errors import ConfigError
from tests.harness.losses import FAMILIES

RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.yaml"))

PART = "{name: a, source: {kind: csv, path: a.csv}}"
MIXTURE = f"data.train={{kind: mixture, parts: [{PART}, {PART.replace('a,', 'b,')}]}}"
MINIMAL = """
model: {path: model, dtype: float32, max_context: 64}
data: {train: {kind: reasoning_gym, dataset: chain_sum, size: 10}, prompt: "{question}"}
sampling: {k: 4, max_tokens: 8}
schedule: {steps: 10, prompts_per_step: 8}
learner: {loss: {name: online_dpo, beta: 0.1}}
reward: {functions: [{name: exact_match}]}
"""


@pytest.fixture
def minimal(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL)
    return file


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid(path):
    load_recipe(path)


def test_the_dumped_recipe_loads_to_the_same(minimal, tmp_path):
    recipe = load_recipe(minimal, ["learner.optimizer.lr=1e-5", "sampling.stop=[a, b]"])
    assert recipe.learner.optimizer.lr == 1e-5
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe


def test_paths_are_relative_to_the_recipe(minimal, monkeypatch):
    monkeypatch.chdir("/")
    assert load_recipe(minimal).model.path == str(minimal.parent / "model")
    loss = load_recipe(minimal, ["learner.loss={name: ppo, critic_model: rm}"]).learner.loss
    assert loss.critic_model == str(minimal.parent / "rm")


def test_paths_of_data_and_code_are_relative_to_the_recipe(minimal):
    """Also with colons in a folder's name, which mean something in a path of code alone."""
    parts = [
        "{name: a, source: {kind: csv, path: 'x:y/a.csv'}}",
        "{name: b, source: {kind: python, path: 'rows.py:make'}}",
        "{name: c, source: {kind: python, path: 'package.rows:make'}}",
        "{name: d, source: {kind: huggingface, name: owner/name}}",
        "{name: e, source: {kind: huggingface, path: folder}}",
    ]
    recipe = load_recipe(minimal, [f"data.train={{kind: mixture, parts: [{', '.join(parts)}]}}"])
    folder = minimal.parent
    paths = [getattr(part.source, "path", None) for part in recipe.data.train.parts]
    assert paths == [
        *(f"{folder}/x:y/a.csv", f"{folder}/rows.py:make", "package.rows:make"),
        *(None, f"{folder}/folder"),
    ]
    assert recipe.data.train.parts[3].source.name == "owner/name"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.optimiser.lr=1", "learner.optimiser: unknown key; did you mean optimizer?"),
        ("learner.loss.bta=3", "learner.loss.bta: unknown key; did you mean beta?"),
        ("reward.functions.0.nme=x", "reward.functions.0.nme: unknown key; did you mean name?"),
        (
            "schedule.max_lag=-1",
            "schedule.max_lag: expected greater than or equal to 0, found '-1'",
        ),
        (
            "generator.engine.name=vlm",
            "generator.engine.name: there is no 'vlm'; did you mean vllm? allowed here: vllm, tr",
        ),
        ("generator.engine=vllm", "engine: expected a section such as {name: vllm}, found 'vllm'"),
        ("learner.loss={}", "learner.loss.name: required, but missing; allowed: online_dpo, ipo"),
        ("data.train={kind: csv}", "data.train.path: required, but missing (The file, absolute or"),
        (
            "learner.lora=true",
            "lora: expected a section with keys such as adapter, alpha, r, found",
        ),
        ("model.dtype=fp16", "model.dtype: expected 'float32' or 'bfloat16', found 'fp16'"),
        ("sampling.k=1", "set k >= 2"),
        ("sampling.max_tokens=64", "no room is left for a prompt"),
        ("evaluation={}", "evaluation needs data.heldout"),
        ("learner.batching.mini_batches=9", "more than schedule.prompts_per_step"),
        ("learner.old_logprobs=behaviour", "old_logprobs is not used by the loss online_dpo"),
        ("data.system=hello", "system is only used with chat"),
        ("data.chat_params={a: 1}", "chat_params is only used with chat"),
        ("data={train: {kind: csv, path: x}, messages: talk}", "messages need a chat template"),
        ("data.messages=talk|data.chat=true", "expected prompt or messages, found both"),
        ("data.train={kind: huggingface}", "expected either name (on the hub) or path"),
        ("data.train={kind: huggingface, path: a, revision: b}", "revision is only used with name"),
        ("data.train={kind: csv, path: a, delimiter: ab}", "data.train.delimiter"),
        (f"data.train={{kind: mixture, parts: [{PART}]}}", "at least 2 items"),
        (f"data.train={{kind: mixture, parts: [{PART}, {PART}]}}", "names must differ"),
        (
            f"data.train={{kind: mixture, parts: [{PART}, {PART.replace('a,', 'b, weight: 1,')}]}}",
            "a weight for every part or for none",
        ),
        (
            f"reward.functions=[{{name: exact_match, parts: [a]}}]|{MIXTURE}",
            "no reward function scores the part b",
        ),
        (
            f"reward.functions=[{{name: exact_match, parts: [c]}}]|{MIXTURE}",
            "parts: c, expected parts of a mixture in data (a, b)",
        ),
        ("reward.functions=[{name: exact_match, parts: [a]}]", "(there is none)"),
        (
            f"data.train={{kind: mixture, parts: [{PART}, {PART.replace('a,', 'b, wieght: 1,')}]}}",
            "data.train.parts.1.wieght: unknown key; did you mean weight?",
        ),
        ("learner.loss={name: rloo}|sampling.top_p=0.9", "allow_biased_ratio"),
        ("generator={weight_update: drain, kv_on_update: keep}", "kv_on_update is not used"),
        ("reward.functions=[{name: a}, {name: a}]", "names must differ"),
        ("learner.corrections=[{name: tis}]", "no ratio to the policy that sampled"),
        (
            "learner={loss: {name: grpo}, old_logprobs: behaviour, corrections: [{name: tis}]}",
            "which is 1 with old_logprobs: behaviour",
        ),
        ("learner.loss={name: grpo, kl_in: reward}", "kl_in is not used with kl_coef 0"),
        ("learner.loss={name: dapo, overlong_penalty: 2}", "not used without overlong_buffer"),
        ("learner.mask_truncated=true", "compares with nothing"),
        (
            "learner={loss: {name: grpo}, logprob_temperature: 1}",
            "takes a ratio to log-probs at sampling.temperature",
        ),
        ("schedule.oversample=2", "set learner.filter_equal_groups"),
        (
            "learner.optimizer={schedule_per: step, warmup_updates: 3}",
            "warmup_updates is not used with schedule_per",
        ),
        ("nonsense", "expected KEY=VALUE"),
        ("model.path.x=1", "path is the value"),
        ("reward.functions.5.name=x", "expected an index below 1"),
    ],
)
def test_mistakes_are_named(minimal, override, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(minimal, override.split("|"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "expected a mapping"),
        ("{}", "model: required, but missing; a section with at least path"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(file)


def test_several_mistakes_are_told_at_once(minimal):
    with pytest.raises(ConfigError) as caught:
        load_recipe(minimal, ["schedule={}", "model.dtyp=x"])
    lines = str(caught.value).removeprefix(f"{minimal}: ").splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "model.dtyp",
        "schedule.steps",
        "schedule.prompts_per_step",
    ]


def test_a_missing_file():
    with pytest.raises(ConfigError, match="can't be read"):
        load_recipe("/nowhere.yaml")


def test_settings_are_frozen(minimal):
    recipe = load_recipe(minimal)
    with pytest.raises(ValueError, match="frozen"):
        recipe.schedule.steps = 3
    assert yaml.safe_load(dump_recipe(recipe))["schedule"]["steps"] == 10


def test_lora_settings_are_those_of_a_new_adapter_or_of_a_folder(minimal):
    new = load_recipe(minimal, ["learner.lora.r=8"]).learner.lora
    assert (new.rank, new.scale, new.modules) == (8, 16.0, "all-linear")
    assert load_recipe(minimal, ["learner.lora={}"]).learner.lora.rank == 16
    started = load_recipe(minimal, ["learner.lora.adapter=before"]).learner.lora
    assert started.adapter == str(minimal.parent / "before")
    with pytest.raises(ConfigError, match="alpha would have no effect"):
        load_recipe(minimal, ["learner.lora={adapter: before, alpha: 3}"])
    with pytest.raises(ConfigError, match=r"learner\.lora\.dropout: unknown key"):
        load_recipe(minimal, ["learner.lora.dropout=0.1"])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_dumped_loss_loads_to_the_same(minimal, tmp_path, name):
    """Processes read the dump, in which every default is written out."""
    recipe = load_recipe(minimal, [f"learner.loss={{name: {name}}}"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe


def test_oversampled_cohorts_are_rounded_up(minimal):
    recipe = load_recipe(minimal, ["schedule.oversample=1.3", "learner.filter_equal_groups=true"])
    assert recipe.schedule.prompts_per_step == 8
    assert recipe.schedule.cohort_size == 11
