"""The prepared policy: its tokenizer, its demonstrations, and a whole tiny preparation through TRL."""

import json
import random

import pytest
from pydantic import ValidationError

from offbeat.config.data import DataSettings
from offbeat.errors import DataError, ModelError
from services.learner.prepare.demonstrators import careless, careless_answer
from services.learner.prepare.rows import examples
from services.learner.prepare.sft import Example, SftSettings, demonstrations, prepare_sft
from services.learner.prepare.tokenizer import character_tokenizer

TINY = SftSettings(
    steps=4,
    batch=8,
    warmup_steps=1,
    hidden_size=32,
    layers=1,
    heads=1,
    intermediate_size=32,
    evaluate_every=2,
    evaluation_prompts=16,
)


def source(seed: int, size: int) -> dict:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {
        "kind": "reasoning_gym",
        "dataset": "chain_sum",
        "params": digits,
        "seed": seed,
        "size": size,
    }


@pytest.fixture(scope="module")
def split() -> tuple[list[Example], list[Example]]:
    settings = {
        "train": source(0, 200),
        "heldout": source(10_000, 30),
        "prompt": "{entry[metadata][expression]} =",
    }
    return examples(DataSettings.model_validate(settings))


def test_tokenizer_gives_back_any_text_of_its_alphabet() -> None:
    tokenizer = character_tokenizer(" +-=0123456789\n", max_length=64)
    text = "12 + 34 =\n -5 "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("1x")["input_ids"][1] == tokenizer.unk_token_id
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12 + 34", "46"),
        ("29 + 55", "74"),
        ("87 + 45", "122"),
        ("82 - 79", "13"),
        ("23 - 60", "47"),
        ("15 - 26", "11"),
        ("40 - 40", "0"),
        ("7 - 10", "13"),
        ("199 + 901", "1090"),
    ],
)
def test_careless_answers_forget_carry_borrow_and_sign(expression: str, answer: str) -> None:
    assert careless_answer(expression) == answer


def test_carelessness_grows_towards_the_end() -> None:
    row = {"answer": "84", "entry": {"metadata": {"expression": "29 + 55"}}}
    rng = random.Random(0)
    early, late = ([careless(row, rng, done) for _ in range(300)] for done in (0.5, 0.9))
    assert set(early) == set(late) == {"84", "74"}
    assert early.count("74") < late.count("74")


def test_training_never_sees_a_held_out_prompt(split) -> None:
    train, heldout = split
    assert not {e.prompt for e in train} & {e.prompt for e in heldout}
    assert all(e.prompt == f"{e.row['entry']['metadata']['expression']} =" for e in train)


def test_demonstrations_repeat_rows_in_new_orders(split) -> None:
    train, _ = split
    shown = demonstrations(TINY.model_copy(update={"steps": 60}), train[:100])
    assert len(shown) == 480
    first, second = shown[:100], shown[100:200]
    assert sorted(first) == sorted(second)
    assert first != second


def test_prepared_folder_loads_and_says_how_it_came_about(split, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train, heldout = split
    out = tmp_path / "new" / "policy"
    evaluations = prepare_sft(TINY, train=train, heldout=heldout, out=out)
    assert [e.step for e in evaluations] == [2, 4]
    assert [p.name for p in out.parent.iterdir()] == ["policy"]
    described = json.loads((out / "prepare.json").read_text())
    assert described["settings"]["hidden_size"] == 32
    assert [e["step"] for e in described["evaluations"]] == [2, 4]
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ModelError, match="remove it"):
        prepare_sft(TINY, train=train, heldout=heldout, out=out)


def test_shared_prompts_are_refused(split, tmp_path) -> None:
    train, heldout = split
    with pytest.raises(DataError, match="in both"):
        prepare_sft(TINY, train=[*train, heldout[0]], heldout=heldout, out=tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_head_size_must_suit_the_engine() -> None:
    with pytest.raises(ValidationError, match="multiple of 32"):
        SftSettings(hidden_size=96, heads=4)
