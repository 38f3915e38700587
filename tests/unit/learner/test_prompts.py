"""Prompts: format strings, conversations, what is dropped and counted, what goes along, and clear errors."""

import json

import pytest
from transformers import AutoTokenizer

from offbeat.config.load import parse_recipe
from offbeat.errors import ConfigError, DataError
from offbeat.streams.columns import decode_columns
from services.learner.data.dataset import (
    Dataset,
    TrainingPrompts,
    load_dataset,
    make_dataset,
    prompt_limit,
)
from services.learner.data.prompts import Prompt
from services.learner.data.sources import load_data
from services.learner.evaluation import Evaluator
from services.learner.tasks import TaskMaker, seeds_of
from tests.harness.tiny_models import make_tiny_model

CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ mark }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Words:
    """A tokenizer that makes a token of each word; enough for what prompts need of one."""

    chat_template = None

    def __call__(self, texts, **_):
        return {"input_ids": [list(range(len(text.split()))) for text in texts]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A real tokenizer, of a token per letter, with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tiny_model(folder, tied=True)
    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = CHAT
    return found


@pytest.fixture
def made(tmp_path, recipe):
    """Makes the prompts of rows, with the recipe's `data` as given."""

    def make(rows, tokenizer=None, heldout=(), **data) -> Dataset:
        files = {"train": rows, "heldout": heldout}
        sources = {}
        for name, listed in files.items():
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in listed))
            sources[name] = {"kind": "jsonl", "path": str(file)} if listed else None
        tree = recipe.model_dump(mode="json") | {"data": {**sources, **data}, "evaluation": None}
        changed = parse_recipe(tree, source="test")
        return make_dataset(changed, load_data(changed.data), tokenizer or Words())

    return make


def _texts(dataset: Dataset) -> list[str]:
    return [prompt.text for prompt in dataset.train.all]


def _prompts(letters: str) -> list[Prompt]:
    return [Prompt(letter, [1], {}) for letter in letters]


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_seeds_do_not_depend_on_the_attempt(recipe):
    maker = TaskMaker(recipe, TrainingPrompts([_prompts("a")], seed=0, shuffle=True))
    first = maker.make(7, attempt=0, term=1, min_version=1)
    again = maker.make(7, attempt=3, term=2, min_version=4)
    assert list(first.seeds) == list(again.seeds) == seeds_of(0, 7, 4)
    assert len({seed for ordinal in range(100) for seed in seeds_of(0, ordinal, 4)}) == 400


def test_exact_mode_names_the_only_version(recipe):
    prompts = TrainingPrompts([_prompts("a")], seed=0, shuffle=True)
    exact = recipe.model_copy(
        update={"schedule": recipe.schedule.model_copy(update={"lag_mode": "exact"})}
    )
    assert TaskMaker(exact, prompts).make(0, attempt=0, term=1, min_version=4).max_version == 4
    assert TaskMaker(recipe, prompts).make(0, attempt=0, term=1, min_version=4).max_version == 0


def test_prompts_by_ordinal_have_the_shares_of_their_parts():
    parts = [_prompts("ab"), _prompts("vwxyz")]
    weighted = TrainingPrompts(parts, [3, 1], seed=0, shuffle=False)
    assert "".join(weighted.at(ordinal).text for ordinal in range(12)) == "vabawbabxaba"
    by_size = TrainingPrompts(parts, seed=0, shuffle=True)
    assert sorted(by_size.at(ordinal).text for ordinal in range(7)) == list("abvwxyz")
    assert "".join(prompt.text for prompt in by_size.all) == "abvwxyz"


# --- format strings --------------------------------------------------------------------------------------------------


def test_a_column_that_is_missing_is_named_with_file_and_line(made, tmp_path):
    rows = [{"question": "a"}, {"answer": "1"}]
    with pytest.raises(DataError) as caught:
        made(rows, prompt="{question}")
    assert str(caught.value) == (
        f"data.train: {tmp_path}/train.jsonl:2: the prompt needs the column 'question'; the row has: answer"
    )


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ("{a[x]}", DataError, r"jsonl:1: the prompt '\{a\[x\]\}' does not fit the row: TypeError"),
        ("{a:d}", DataError, "jsonl:1: .* ValueError: Unknown format code 'd'"),
        ("{a.b}", DataError, "jsonl:1: .* AttributeError"),
        ("{a", ConfigError, "no format string: expected '}' before end of string"),
        ("{}", ConfigError, r"expected names of columns in braces, found \{\}"),
        ("{0}", ConfigError, r"found \{0\}; name the column"),
    ],
)
def test_format_strings_that_do_not_fit(made, prompt, error, said):
    with pytest.raises(error, match=said):
        made([{"a": "x"}], prompt=prompt)


def test_what_is_dropped_is_counted_and_logged(made, caplog):
    rows = [{"q": "a b c d"}, {"q": "a"}, {"q": None}, {"q": ""}, {"q": "held"}, {"q": "b"}]
    dataset = made(rows, heldout=[{"q": "held"}, {"q": "a b c"}], prompt="{q}", max_prompt_tokens=3)
    assert _texts(dataset) == ["a", "b"]
    train, heldout = dataset.counts
    assert (train.rows, train.used, train.empty, train.too_long, train.held_out) == (6, 2, 2, 1, 1)
    assert (train.longest, train.passes) == (4, 20.0)
    assert (heldout.used, heldout.longest) == (2, 3)
    assert (
        "data.train: 2 of 6 prompts used (100.0% of all, each 20.00 times in this run); "
        "left out: 1 held out, 2 empty, 1 longer than 3 tokens (longest: 4)"
    ) in caplog.text


def test_nothing_left_is_an_error_that_tells_why(made):
    with pytest.raises(DataError, match=r"1 longer than 3 tokens .* no prompt is left; see data.m"):
        made([{"q": "a b c d"}], prompt="{q}", max_prompt_tokens=3)
    with pytest.raises(DataError, match=r"1 held out.* no prompt is left"):
        made([{"q": "a"}], heldout=[{"q": "a"}], prompt="{q}")


def test_completions_need_room_in_the_context(made):
    """max_context 64, of which completions take 8."""
    assert made([{"q": "a " * 56}, {"q": "a " * 57}], prompt="{q}").counts[0].too_long == 1


def test_texts_are_tokenised_alike_alone_and_together(made, tokenizer):
    rows = [{"q": text} for text in ("abc", "a", "xyzxyz")]
    dataset = made(rows, tokenizer, prompt="{q}")
    assert [p.token_ids for p in dataset.train.all] == [
        tokenizer(row["q"])["input_ids"] for row in rows
    ]


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_prompt_becomes_the_users_turn(made, tokenizer):
    dataset = made([{"q": "hi"}], tokenizer, prompt="{q}", chat=True, system="be brief")
    assert _texts(dataset) == ["<system>be brief<user>hi<assistant>"]
    ids = tokenizer("<system>be brief<user>hi<assistant>", add_special_tokens=False)["input_ids"]
    assert dataset.train.all[0].token_ids == ids


def test_conversations_keep_their_own_system_turn(made, tokenizer):
    ask = [{"role": "user", "content": "hi"}]
    rows = [{"talk": ask}, {"talk": [{"role": "system", "content": "rhyme"}, *ask]}, {"talk": []}]
    params = {"mark": "|"}
    dataset = made(
        rows, tokenizer, messages="talk", chat=True, system="be brief", chat_params=params
    )
    assert _texts(dataset) == [
        "<system>be brief|<user>hi|<assistant>",
        "<system>rhyme|<user>hi|<assistant>",
    ]
    assert dataset.counts[0].empty == 1
    assert json.loads(dataset.train.all[0].columns["talk"].json) == ask


@pytest.mark.parametrize(
    ("talk", "said"),
    [
        ("hi", "expected a list of turns with role and content .*, found str"),
        ([{"role": "user"}], "expected role and content as text in turn 0"),
        ([{"role": "user", "content": "a"}, "b"], "expected role and content as text in turn 1"),
        ([{"role": "user", "content": ["a"]}], "expected role and content as text in turn 0"),
        ([{"role": "assistant", "content": "a"}], "the last turn of the messages is the assist"),
        ([{"role": "tool", "content": "a"}], "the chat template refuses .*no tools"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_messages_that_are_none(made, tokenizer, talk, said):
    with pytest.raises(DataError, match=rf"data.train: .*train\.jsonl:1: {said}"):
        made([{"talk": talk}], tokenizer, messages="talk", chat=True)


def test_the_reply_of_a_conversation_becomes_a_column(made, tokenizer):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    dataset = made(
        [{"talk": talk, "n": 1}],
        tokenizer,
        messages="talk",
        chat=True,
        reply_column="reply",
        columns=[],
    )
    assert _texts(dataset) == ["<user>hi<assistant>"]
    columns = decode_columns(dataset.train.all[0].columns)
    assert columns == {"reply": "hello"}


@pytest.mark.parametrize(
    ("talk", "name", "said"),
    [
        (
            [{"role": "user", "content": "hi"}],
            "reply",
            "expected the assistant's reply as the last",
        ),
        (
            [{"role": "assistant", "content": 3}],
            "reply",
            "expected text as the content of the last",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "talk",
            "taken",
        ),
        ("no list", "reply", "expected a list of turns"),
    ],
)
def test_a_conversation_without_a_reply_to_take(made, tokenizer, talk, name, said):
    with pytest.raises(DataError, match=said):
        made([{"talk": talk}], tokenizer, messages="talk", chat=True, reply_column=name)


def test_a_chat_template_of_the_recipe_wins_over_the_tokenizers(made, tokenizer):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    dataset = made([{"q": "hi"}], tokenizer, prompt="{q}", chat=True, chat_template=template)
    assert _texts(dataset) == ["[hi]"]


def test_white_space_around_a_prompt_is_kept_unless_told(made):
    rows = [{"q": "  \n a b "}]
    assert _texts(made(rows, prompt="{q}")) == ["  \n a b "]
    assert _texts(made(rows, prompt="{q}", strip=True)) == ["a b"]


def test_room_for_a_prompt_is_what_the_longest_completion_leaves(recipe):
    """Also a held-out one, which may be longer than those of training."""
    tree = recipe.model_dump(mode="json")
    tree["data"]["heldout"] = tree["data"]["train"]
    context, trained = recipe.model.max_context, recipe.sampling.max_tokens
    tree["data"]["max_prompt_tokens"] = context
    assert prompt_limit(parse_recipe(tree, source="test")) == context - trained
    tree["evaluation"] = {"max_tokens": trained + 3}
    changed = parse_recipe(tree, source="test")
    assert prompt_limit(changed) == context - trained - 3
    prompt = Prompt("a", [1], {})
    tree["run"]["id"] = "mine"
    tasks = Evaluator(parse_recipe(tree, source="test"), [prompt]).start(
        step=0, version=1, term=1, whole=True
    )
    assert {task.sampling.max_tokens for task in tasks} == {trained + 3}
    tree["evaluation"] = {"max_tokens": context}
    with pytest.raises(ConfigError, match="no room is left"):
        parse_recipe(tree, source="test")


def test_a_tokenizer_without_a_chat_template(made):
    with pytest.raises(ConfigError, match="has no chat template"):
        made([{"q": "hi"}], prompt="{q}", chat=True)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_all_columns_go_along_or_those_that_are_named(made):
    rows = [{"q": "a", "answer": 1, "source": "x"}]
    assert set(made(rows, prompt="{q}").train.all[0].columns) == {"q", "answer", "source"}
    named = made(rows, prompt="{q}", columns=["answer"]).train.all[0].columns
    assert {name: value.integer for name, value in named.items()} == {"answer": 1}
    with pytest.raises(
        DataError, match=r"data.columns: expected .*\(answer, q, source\), found 'anwser'"
    ):
        made(rows, prompt="{q}", columns=["anwser"])


def test_names_of_arguments_are_no_columns(made):
    rows = [{"q": "a", "completions": "x"}]
    with pytest.raises(DataError, match=r"train\.jsonl:1: the column name 'completions' is taken"):
        made(rows, prompt="{q}")
    assert set(made(rows, prompt="{q}", columns=["q"]).train.all[0].columns) == {"q"}


# --- a whole recipe --------------------------------------------------------------------------------------------------


def test_a_mixture_of_all_local_kinds(tmp_path, recipe):
    """From the recipe's settings to prompts by ordinal: shares, names of parts, held-out rows, counts per part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    make_tiny_model(tmp_path / "model", tied=True)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "held"}\n')
    (tmp_path / "b.csv").write_text("text,level\nb,1\nbb,2\nbbb,3\n")
    pq.write_table(pa.Table.from_pylist([{"prompt": "c"}] * 2), tmp_path / "c.parquet")
    (tmp_path / "held.csv").write_text("prompt\nheld\n")
    parts = [
        {"name": "a", "weight": 2, "source": {"kind": "jsonl", "path": str(tmp_path / "a.jsonl")}},
        {
            **{"name": "b", "weight": 1, "prompt": "{text}"},
            "source": {"kind": "csv", "path": str(tmp_path / "b.csv")},
        },
        {
            "name": "c",
            "weight": 1,
            "source": {"kind": "parquet", "path": str(tmp_path / "c.parquet")},
        },
    ]
    held = {"kind": "csv", "path": str(tmp_path / "held.csv")}
    data = {
        "train": {"kind": "mixture", "parts": parts},
        "heldout": {
            "kind": "mixture",
            "parts": [{"name": "x", "source": held}, {"name": "y", "source": held}],
        },
    }
    tree = recipe.model_dump(mode="json") | {"data": data}
    dataset = load_dataset(parse_recipe(tree, source="test"))
    issued = [dataset.train.at(ordinal) for ordinal in range(40)]
    shares = {name: [p.text for p in issued if p.columns["part"].text == name] for name in "abc"}
    assert [len(texts) for texts in shares.values()] == [20, 10, 10]
    assert set(shares["a"]) == {"a"}
    assert all(sorted(shares["b"][i : i + 3]) == ["b", "bb", "bbb"] for i in (0, 3, 6))
    assert [(p.text, p.columns["part"].text) for p in dataset.heldout] == [
        ("held", "x"),
        ("held", "y"),
    ]
    found = {counts.what: (counts.used, counts.held_out, counts.share) for counts in dataset.counts}
    assert found == {
        "data.train.parts.0 (a)": (1, 1, 0.5),
        "data.train.parts.1 (b)": (3, 0, 0.25),
        "data.train.parts.2 (c)": (2, 0, 0.25),
        "data.heldout.parts.0 (x)": (1, 0, 0.5),
        "data.heldout.parts.1 (y)": (1, 0, 0.5),
    }
    assert dataset.counts[0].passes == 20.0
