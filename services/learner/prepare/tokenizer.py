"""A tokenizer with one token per character, for small policies that are made from nothing. Used by `sft`."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def alphabet_of(texts: Iterable[str]) -> str:
    """The characters of the texts, sorted."""
    return "".join(sorted({character for text in texts for character in text}))


def character_tokenizer(alphabet: str, *, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer over the characters of `alphabet`; it adds no special token by itself."""
    tokens = [PAD, EOS, UNKNOWN, *alphabet]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    # Any one character, line breaks included.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        padding_side="left",
        # Spaces before punctuation belong to the text.
        clean_up_tokenization_spaces=False,
    )
