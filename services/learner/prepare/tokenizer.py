"""Tokenizers for small policies made from nothing: of characters, or learned from text. Used by `sft`, `tldr`."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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


def bpe_tokenizer(
    texts: Iterable[str], *, vocabulary: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocabulary` tokens, learned from the texts; it adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
