"""Slices of real models, as checkpoints of the Hub: `python bench/slices.py qwen|gptoss FOLDER`.

A slice has its model's layers at their true shapes, but fewer of them, a smaller vocabulary and random weights: enough
to time all that a token meets. transformers, tutel-convert and llama.cpp's converter all read it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

DEVIATION = 0.02
"""Of the weights, which are normal."""

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "vocab_size": 32768, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""8 of the 48 layers of Qwen3-30B-A3B."""

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 4,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "intermediate_size": 2880, "swiglu_limit": 7.0,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "vocab_size": 32768, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""4 of the 24 layers of gpt-oss-20b, in the layout of its BF16 checkpoints."""

CONFIGS = {"qwen": QWEN, "gptoss": GPT_OSS}

Normal = Callable[..., Tensor]
"""Shape -> random bfloat16 weights."""


def make_slice(model: str, folder: Path, seed: int = 0) -> None:
    """Write the checkpoint of a slice, a file for every layer and one for the rest, holding one of them at a time."""
    config, generator = CONFIGS[model], torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, DEVIATION, generator=generator)

    files = {}
    for number, tensors in enumerate(_shards(config, normal)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    _write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    _write(folder, "tokenizer.json", _tokenizer(config["vocab_size"]))
    _write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    _write(folder, "config.json", config)  # last: who finds it finds a whole checkpoint


def _shards(config: dict, normal: Normal) -> Iterator[dict[str, Tensor]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "lm_head.weight": normal(vocab, hidden),
        "model.norm.weight": _ones(hidden),
    }
    block = _qwen_block if config["model_type"] == "qwen3_moe" else _gpt_oss_block
    for layer in range(config["num_hidden_layers"]):
        tensors = _attention(config, normal) | block(config, normal)
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def _attention(config: dict, normal: Normal) -> dict[str, Tensor]:
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    tensors = {f"self_attn.{name}_proj.weight": normal(*shape) for name, shape in shapes.items()}
    if config["attention_bias"]:
        tensors |= {f"self_attn.{name}_proj.bias": normal(shape[0]) for name, shape in shapes.items()}
    return tensors | {f"{name}_layernorm.weight": _ones(hidden) for name in ("input", "post_attention")}


def _qwen_block(config: dict, normal: Normal) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    tensors = {f"self_attn.{name}_norm.weight": _ones(config["head_dim"]) for name in "qk"}
    tensors["mlp.gate.weight"] = normal(config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        tensors |= {f"mlp.experts.{expert}.{name}_proj.weight": normal(*shape) for name, shape in shapes.items()}
    return tensors


def _gpt_oss_block(config: dict, normal: Normal) -> dict[str, Tensor]:
    hidden, inner, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    return {
        "self_attn.sinks": normal(config["num_attention_heads"]),
        "mlp.router.weight": normal(experts, hidden),
        "mlp.router.bias": normal(experts),
        "mlp.experts.gate_up_proj": normal(experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": normal(experts, 2 * inner),
        "mlp.experts.down_proj": normal(experts, inner, hidden),
        "mlp.experts.down_proj_bias": normal(experts, hidden),
    }


def _ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bfloat16)


def _tokenizer(vocab: int) -> dict:
    """Words t3, t4, … for the ids 3, 4, …; by byte-pair encoding with one merge, which llama.cpp does not go without."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {
            "type": "BPE", "merges": [["t", "3"]], "ignore_merges": True,
            "vocab": {"t": 0, "3": 1, "<end>": 2} | {f"t{i}": i for i in range(3, vocab)},
        },
    }  # fmt: skip


def _write(folder: Path, name: str, content: dict) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_slice(options.model, options.folder, options.seed)


if __name__ == "__main__":
    main()
