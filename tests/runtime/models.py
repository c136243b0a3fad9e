"""Small random models: transformers' Qwen3MoeForCausalLM, and ours on the same decoded weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tutel_pack.artifact import Entry, FileWriter, Manifest, describe_file, write_manifest
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe, Rope, Router

CONFIG = {
    # K of 96 and I of 160 leave ragged blocks in every format; 4 heads of 32 are wider than the hidden size.
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 224,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
PACKED = ("experts.gate_up_proj", "experts.down_proj", "_proj.weight", "lm_head.weight")


def make_model(**options) -> Qwen3MoeForCausalLM:
    """Random weights, large enough that every part matters; norms and biases away from 1 and 0."""
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**CONFIG, **options})).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            p.normal_(std=0.3)
        else:
            p.normal_(std=1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5)
    return model


def make_spec(c: Qwen3MoeConfig) -> ModelSpec:
    attention = Attention(
        c.num_attention_heads, c.num_key_value_heads, c.head_dim, Rope(c.rope_parameters["rope_theta"], c.head_dim),
        qk_norm="head", bias="qkvo" * c.attention_bias, window=c.sliding_window,
    )  # fmt: skip
    moe = Moe(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, Router(renormalize=c.norm_topk_prob))
    layers = tuple(
        Layer(attention, Mlp(c.intermediate_size) if i in c.mlp_only_layers or (i + 1) % c.decoder_sparse_step else moe)
        for i in range(c.num_hidden_layers)
    )
    context, eps, tied = c.max_position_embeddings, c.rms_norm_eps, c.tie_word_embeddings
    return ModelSpec("qwen3_moe", c.hidden_size, c.vocab_size, context, eps, tied, layers)


def pack(model: Qwen3MoeForCausalLM, fmt: str) -> dict[str, torch.Tensor | PackedTensor]:
    """The model's weights, projections packed; the model is given their decoded values."""
    weights = {}
    for name, p in model.named_parameters():
        if not name.endswith(PACKED):
            weights[name] = p.data
            continue
        n = p.shape[-2]
        segments = (n // 2, n // 2) if name.endswith("gate_up_proj") else (n,)
        weights[name] = encode(p.data, FORMATS[fmt], segments).tensor
        p.data.copy_(decode(weights[name]))
    return weights


class Pair:
    """transformers' model and ours on the same weights."""

    def __init__(self, fmt: str, **options):
        self.theirs = make_model(**options)
        self.weights = pack(self.theirs, fmt)
        self.spec = make_spec(self.theirs.config)

    def decoder(self, dtype=torch.float32) -> Decoder:
        return Decoder(self.spec, self.weights.__getitem__, "cpu", dtype, "torch")

    def write_artifact(self, folder: Path) -> Path:
        """The packed weights as an artifact of one file, plain ones in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: w if isinstance(w, PackedTensor) else w.bfloat16() for n, w in self.weights.items()}
        entries = {n: entry_of("base.safetensors", w) for n, w in weights.items()}
        stored = {k: v for n, e in entries.items() for k, v in e.stored(n).items()}
        writer = FileWriter(folder / "base.safetensors", stored)
        for name, w in weights.items():
            for suffix, part in (w.parts() if isinstance(w, PackedTensor) else {"": w}).items():
                if part is not None:
                    writer.write(name + suffix, (), part)
        writer.close()
        files = {"base.safetensors": describe_file(folder / "base.safetensors")}
        write_manifest(folder, Manifest({"repo": "tiny", "commit": None}, self.spec, {}, entries, files))
        return folder


def entry_of(file: str, w: torch.Tensor | PackedTensor) -> Entry:
    if isinstance(w, PackedTensor):
        return Entry(file, w.shape, w.format, w.segments)
    return Entry(file, tuple(w.shape), dtype=w.dtype)
