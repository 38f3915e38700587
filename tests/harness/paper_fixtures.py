"""Small local stand-ins for what the paper's recipes load from the hub: data sets column by column, tiny models.

A data-set folder has the form of the hub's repository: Parquet files, and a README that names configurations and
splits. Models have the real architectures; their tokenizer makes a token of each byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

EOS = "<|endoftext|>"
TLDR_POSTS = [
    ("tifu", "I forgot the keys", "I left them at home.\nThen it rained.", "Left keys at home."),
    ("dating", "Is this odd?", "They never write first.", "They do not write first. Odd?"),
    ("pets", "My cat", "It sleeps all day long.", "Cat sleeps a lot."),
    ("long", "Far too much", "word " * 120, "Too many words."),
]
CONVERSATIONS = [
    [("user", "Name a river."), ("assistant", "The Danube.")],
    [
        ("system", "You are curt."),
        ("user", "Hello?"),
        ("assistant", "Yes."),
        ("user", "Who are you?"),
        ("assistant", "A bot."),
    ],
]
PROBLEMS = [
    (
        "Ann has 3 boxes of 4 pens. How many pens?",
        "There are 3*4=<<3*4=12>>12 pens.\n#### 12",
    ),
    ("A car costs 900 and tax is 250. In all?", "900+250=<<900+250=1150>>1150\n#### 1,150"),
]


def byte_tokenizer(**special: str) -> Any:
    """One token per byte, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {EOS: 0, "[PAD]": 1} | {character: i + 2 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"eos_token": EOS, "pad_token": "[PAD]"} | special)
    )


def _save(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model.eval()


def pythia(folder: Path, *, seed: int, reward: bool = False) -> Any:
    """A GPT-NeoX, as Pythia is one: a language model or a reward model."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=264,
        hidden_size=64,  # heads of 32: the smallest that vLLM has on a CPU
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        num_labels=1,
        initializer_range=0.2,
    )
    kind = GPTNeoXForSequenceClassification if reward else GPTNeoXForCausalLM
    return _save(kind(config), folder)


def llama(folder: Path, *, seed: int, reward: bool = False) -> Any:
    """A Llama, as Llama 3.1 and Rho are: a language model or a reward model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=0,
        num_labels=1,
        initializer_range=0.2,
    )
    kind = LlamaForSequenceClassification if reward else LlamaForCausalLM
    return _save(kind(config), folder)


def tldr_repository(folder: Path) -> Path:
    """The layout of vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144."""
    tokenizer = byte_tokenizer()
    rows = []
    for index, (subreddit, title, post, summary) in enumerate(TLDR_POSTS):
        text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
        query = "  " * (index + 1) + text  # padded with spaces in front
        reference = f" {summary}{EOS}"
        both = query.strip() + reference
        rows.append(
            {
                "id": f"t3_{index}",
                "subreddit": subreddit,
                "title": title,
                "post": post,
                "summary": summary,
                "query_token": tokenizer(query)["input_ids"],
                "query": query,
                "reference_response": reference,
                "reference_response_token": tokenizer(reference)["input_ids"],
                "reference_response_token_len": len(tokenizer(reference)["input_ids"]),
                "query_reference_response": both,
                "query_reference_response_token": tokenizer(both)["input_ids"],
                "query_reference_response_token_len": len(tokenizer(both)["input_ids"]),
            }
        )
    # The last post of each is far too long; the validation split has one that can be used.
    return _repository(folder, {"train": [*rows[1:]], "validation": [rows[0], rows[3]]})


def no_robots_repository(folder: Path) -> Path:
    """The layout of HuggingFaceH4/no_robots."""
    rows = [
        {
            "prompt": next(text for role, text in turns if role == "user"),
            "prompt_id": f"{index:064x}",
            "messages": [{"content": text, "role": role} for role, text in turns],
            "category": "Chat" if len(turns) > 2 else "Open QA",
        }
        for index, turns in enumerate(CONVERSATIONS)
    ]
    return _repository(folder, {"train": rows[1:], "test": rows[:1]})


def gsm8k_repository(folder: Path) -> Path:
    """The layout of openai/gsm8k, configuration main."""
    rows = [{"question": question, "answer": answer} for question, answer in PROBLEMS]
    return _repository(folder, {"train": rows[1:], "test": rows[:1]}, config="main")


def _repository(folder: Path, splits: dict[str, Any], config: str = "default") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = "data" if config == "default" else config
    (folder / place).mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        pq.write_table(
            pa.Table.from_pylist(rows), folder / place / f"{split}-00000-of-00001.parquet"
        )
        card += [f"  - split: {split}", f"    path: {place}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder
