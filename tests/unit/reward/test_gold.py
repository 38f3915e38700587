"""The gold reward of tldr_tiny: embeddings are those of plain transformers, and wins are strict."""

from pathlib import Path

import pytest

from offbeat.imports import load_object

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FILE = Path(__file__).parents[3] / "recipes" / "tldr_tiny" / "gold.py"
POSTS = ["the cat sat on the mat", "a dog ran", "the dog sat", "a dog ran"]
SUMMARIES = [" the cat sat", " a dog ran ran ran ran", "mat", " "]
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "a", "cat", "dog", "sat", "ran", "on", "mat"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def module(folder, monkeypatch):
    encoder = load_object(f"{FILE}:Encoder", key="test")(folder)
    gold = load_object(f"{FILE}:gold", key="test")
    monkeypatch.setitem(gold.__globals__, "encoder", lambda: encoder)
    return gold.__globals__


def _slow_gold(folder, post, summary, cost):
    """Plain transformers, one text at a time, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    means = []
    for text in (post, summary.strip()):
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        means.append(hidden.mean(0).double())
    one, other = means
    return float(one @ other / (one.norm() * other.norm())) - cost * len(summary.split())


def test_gold_is_similarity_less_the_cost_of_words(module, folder):
    expected = [
        _slow_gold(folder, *pair, module["COST"]) for pair in zip(POSTS, SUMMARIES, strict=True)
    ]
    assert module["gold"](SUMMARIES, POSTS) == pytest.approx(expected, abs=1e-5)
    assert module["gold"](SUMMARIES[::-1], POSTS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)


def test_few_remembered_texts_change_nothing(module, monkeypatch):
    expected = module["gold"](SUMMARIES, POSTS)
    monkeypatch.setitem(module, "REMEMBERED", 1)
    for _ in range(2):
        assert module["gold"](SUMMARIES, POSTS) == pytest.approx(expected, abs=1e-5)


def test_a_win_is_strict(module):
    mine, theirs = module["gold"](SUMMARIES, POSTS), module["gold"](POSTS, POSTS)
    wins = module["gold_win"](SUMMARIES, POSTS, POSTS)
    assert wins == [float(m > t) for m, t in zip(mine, theirs, strict=True)]
    assert module["gold_win"](POSTS, POSTS, POSTS) == [0.0] * 4
    assert module["gold_win"](["the cat"], ["the cat"], ["the cat " * 9]) == [1.0]


def test_length_counts_the_end_of_sequence_token(module):
    assert module["tokens"]([[5, 6, 1], [1]]) == [3.0, 1.0]
