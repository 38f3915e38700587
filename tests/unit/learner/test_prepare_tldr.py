"""`prepare: {kind: tldr}` in a miniature of itself, through TRL: data, policy, pairs, proxy."""

import itertools
import json
from pathlib import Path

import pytest

from offbeat.config import load_recipe
from offbeat.errors import DataError, ModelError
from services.learner.prepare import preferences
from services.learner.prepare.preferences import Pair, agreement, label_pairs
from services.learner.prepare.tldr import TldrSettings, prepare_tldr

RECIPE = Path(__file__).parents[3] / "recipes" / "tldr_tiny.yaml"
SMALL = {
    "packages": ["networkx.generators", "networkx.algorithms.centrality"],
    "heldout": 20,
    "vocabulary": 1000,
    "copying": {"steps": 3, "batch": 2},
    "sft": {
        "steps": 4, "batch": 8, "warmup_steps": 1, "hidden_size": 32, "layers": 1, "heads": 1,
        "intermediate_size": 32, "max_context": 128, "prompt_loss_part": 0.5,
        "demonstrator": "services.learner.prepare.demonstrators:extracts",
    },
    "proxy": {"posts": 16, "heldout_posts": 12, "steps": 3, "batch": 8, "warmup_steps": 1},
}  # fmt: skip


def shorter(completions: list[str], post: list[str]) -> list[float]:
    """A gold reward for tests: fewer characters are better, also than the post's."""
    return [len(p) - len(text) for p, text in zip(post, completions, strict=True)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    out = tmp_path_factory.mktemp("tldr") / "prepared"
    settings = TldrSettings.model_validate(SMALL | {"gold": f"{__file__}:shorter"})
    described = prepare_tldr(settings, load_recipe(RECIPE), out)
    return settings, out, described


def test_the_folder_is_whole_and_says_how_it_came_about(prepared):
    settings, out, described = prepared
    assert [path.name for path in out.parent.iterdir()] == ["prepared"]
    assert {path.name for path in out.iterdir()} == {
        "train.jsonl", "heldout.jsonl", "policy", "proxy", "prepare.json",
    }  # fmt: skip
    assert json.loads((out / "prepare.json").read_text()) == described
    assert described["settings"]["sft"]["hidden_size"] == 32
    assert sum(described["train_rows_by_package"].values()) == described["rows"]["train"]
    assert all(0 <= share <= 1 for share in described["proxy_agreement"].values())
    assert 0 <= described["copied"] <= 1
    with pytest.raises(ModelError, match="remove it"):
        prepare_tldr(settings, load_recipe(RECIPE), out)


def test_held_out_rows_are_not_trained_on_and_all_fit(prepared):
    from transformers import AutoTokenizer

    settings, out, described = prepared
    train, heldout = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert {"train": len(train), "heldout": len(heldout)} == described["rows"]
    assert len(heldout) == 20
    for column in ("post", "reference"):
        assert not {row[column] for row in train} & {row[column] for row in heldout}
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    for row in train + heldout:
        assert 14 <= len(tokenizer(row["post"])["input_ids"]) <= settings.max_post_tokens
        assert len(tokenizer(f" {row['reference']}")["input_ids"]) < 20
        assert tokenizer.decode(tokenizer(row["post"])["input_ids"]) == row["post"]


def test_both_models_load_where_they_are_used(prepared):
    from services.learner.model import check_model
    from services.reward.functions.reward_model import RewardModel

    _, out, _ = prepared
    assert check_model(out / "policy", max_context=128).vocabulary == 1000
    function = RewardModel(path=str(out / "proxy"), device="cpu", append_eos=True)
    scores = function(["A post.\nTL;DR:"] * 2, [" one", " another summary"])
    assert scores[0] != scores[1]


def test_agreement_is_measured_on_what_the_reward_worker_would_score(prepared):
    from services.reward.functions.reward_model import RewardModel

    _, out, _ = prepared
    function = RewardModel(path=str(out / "proxy"), device="cpu", append_eos=True)
    texts = [
        f" the {word}"
        for word in ["read", "write", "open", "close", "list", "dict", "file", "line"]
    ]
    pairs = [
        Pair("A post.\nTL;DR:", one, other, 1.0, False) for one, other in itertools.pairwise(texts)
    ]
    scores = dict(zip(texts, function(["A post.\nTL;DR:"] * len(texts), texts), strict=True))
    expected = sum(scores[pair.chosen] > scores[pair.rejected] for pair in pairs) / len(pairs)
    assert agreement(out / "proxy", pairs) == expected


def test_the_proxy_learns_what_gold_prefers(prepared, tmp_path):
    _, out, _ = prepared
    words = ["read", "write", "open", "close", "list", "dict", "file", "line"]
    pairs = [
        Pair("A post.\nTL;DR:", f" {one}", f" {one} {other} {other} {one}", 1.0, False)
        for one in words
        for other in words
    ]
    settings = preferences.ProxySettings(steps=30, batch=16, lr=1e-2, warmup_steps=1)
    preferences.train_proxy(settings, pairs, out / "policy", tmp_path / "work", tmp_path / "proxy")
    assert agreement(tmp_path / "proxy", pairs) > 0.9


def test_a_proxy_can_start_from_another_model_with_its_own_tokenizer(tmp_path):
    from services.reward.functions.reward_model import RewardModel

    bert_folder(tmp_path / "start")
    (tmp_path / "start.py").write_text("def start():\n    return __file__.removesuffix('.py')\n")
    settings = preferences.ProxySettings(
        init=f"{tmp_path / 'start.py'}:start", steps=20, batch=8, lr=1e-2, warmup_steps=1
    )
    pairs = [
        Pair(f"A post of {word}.", " read", f" read {word}", 1.0, False)
        for word in ("file", "line", "list", "dict")
    ]
    preferences.train_proxy(
        settings, pairs, tmp_path / "no policy", tmp_path / "work", tmp_path / "proxy"
    )
    assert agreement(tmp_path / "proxy", pairs) == 1
    function = RewardModel(path=str(tmp_path / "proxy"), device="cpu")
    better, worse = function(["A post of file."] * 2, [" read", " read file"])
    assert better > worse


def bert_folder(folder: Path) -> None:
    """A BERT of two layers, whose tokenizer has no end-of-sequence token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "post", "of", ".", "read", "file", "line", "list", "dict"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)


def test_gold_labels_all_pairs_of_a_row_that_differ():
    rows = [{"post": "x" * 10}, {"post": "y" * 10}]
    pairs = label_pairs(rows, ["p", "q"], [["aaa", "a", "bbb"], ["cc", "c"]], shorter)
    assert pairs == [
        Pair("p", "a", "aaa", 2.0, True),
        Pair("p", "a", "bbb", 2.0, False),
        Pair("q", "c", "cc", 1.0, True),
    ]


def test_too_little_text_is_an_error_and_leaves_nothing(tmp_path):
    settings = TldrSettings.model_validate(
        SMALL | {"gold": f"{__file__}:shorter", "packages": ["httpx"], "heldout": 5000}
    )
    with pytest.raises(DataError, match="expected more than heldout = 5000 rows"):
        prepare_tldr(settings, load_recipe(RECIPE), tmp_path / "prepared")
    assert not list(tmp_path.iterdir())
