"""A tiny Llama as a GGUF file, written with the `gguf` package as llama.cpp's converter lays such a model out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(12)), "ab"]
HEADS, KV_HEADS, LAYERS, HIDDEN, INTERMEDIATE = 2, 1, 2, 32, 64


def tiny_llama() -> Any:
    """The model that the file holds, tied embeddings, float32, always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    ).eval()


def write_tiny_gguf(path: Path) -> Path:
    """Writes `tiny_llama` and a character tokenizer with a chat template to `path`."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    for name, tensor in _tensors(tiny_llama()).items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> dict[str, Any]:
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = dict(model.named_parameters())
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in {"attn_q", "attn_k"}:
                weight = _interleaved(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            found[f"blk.{layer}.{theirs}.weight"] = weight
    return found


def _interleaved(weight: Any, heads: int) -> Any:
    """Rotary halves as llama.cpp pairs them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
