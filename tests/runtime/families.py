"""Tiny random models of transformers, of any family, and ours on the same decoded weights."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.spec import ModelSpec
from tutel_pack.tensors import KEEP, TensorSpec, canonical_tensors

COMMON = {
    # K of 96 and I of 80 leave ragged blocks; head_dim is what hidden_size says where a family has no other.
    "vocab_size": 131,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(model_type: str, **options) -> torch.nn.Module:
    """Random weights, large enough that every part matters; norms, biases, sinks and corrections away from 1 and 0."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(model_type, **{**COMMON, **options})
    attention = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config._attn_implementation, config._experts_implementation = attention.values()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" in name:
            continue
        if "norm" in name:
            p.uniform_(0.5, 1.5)
        elif "correction" in name:
            p.normal_(std=0.3)
        elif name.endswith(("bias", "sinks")):
            p.normal_(std=0.5)
        else:
            inputs = p.shape[1] if model_type == "gpt_oss" and p.ndim == 3 else p.shape[-1]
            p.normal_(std=1.0 if "embed" in name else 1.5 * inputs**-0.5)
    return model


def interleaved(w: torch.Tensor) -> torch.Tensor:
    """[E, 2I, …], gate rows first, with gate and up rows in turns."""
    return torch.stack(w.chunk(2, dim=1), dim=2).flatten(1, 2)


class Pair:
    """transformers' model and ours on the same weights, those that a recipe would pack in `fmt`, or plain with None."""

    def __init__(self, model_type: str, fmt: str | None = None, **options):
        self.theirs = make_model(model_type, **options)
        config = self.theirs.config.to_dict()
        self.spec = replace(import_module(f"tutel_pack.convert.families.{model_type}").spec(config), mtp=())
        self.weights = {}
        state = dict((*self.theirs.named_parameters(), *self.theirs.named_buffers()))
        for name, tensor in canonical_tensors(self.spec).items():
            self.weights[name] = self._take(name, tensor, state[name], fmt)
        left = [name for name in state.keys() - self.weights.keys() if "inv_freq" not in name]
        assert not left, left

    def _take(self, name: str, tensor: TensorSpec, p: torch.Tensor, fmt: str | None) -> torch.Tensor | PackedTensor:
        if self.spec.family == "gpt_oss" and ".experts." in name:
            return self._take_gpt_oss(tensor, p, fmt)
        if tensor.role == KEEP or fmt is None:
            return p.data.reshape(tensor.shape)
        packed = encode(p.data, FORMATS[fmt], tensor.segments or (tensor.shape[-2],)).tensor
        p.data.copy_(decode(packed))
        return packed

    @staticmethod
    def _take_gpt_oss(tensor: TensorSpec, p: torch.Tensor, fmt: str | None) -> torch.Tensor | PackedTensor:
        """Experts are [E, K, N] there, and gate and up alternate along N."""
        w = p.data.transpose(1, 2) if p.ndim == 3 else p.data
        if tensor.segments:
            w = torch.cat([w[:, 0::2], w[:, 1::2]], dim=1)
        if tensor.role == KEEP or fmt is None:
            return w.contiguous()
        packed = encode(w.contiguous(), FORMATS[fmt], tensor.segments or (tensor.shape[-2],)).tensor
        w = interleaved(decode(packed)) if tensor.segments else decode(packed)
        p.data.copy_(w.transpose(1, 2))
        return packed

    def decoder(self, dtype: torch.dtype = torch.float32, spec: ModelSpec | None = None) -> Decoder:
        return Decoder(spec or self.spec, self.weights.__getitem__, "cpu", dtype, "torch")

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.theirs(torch.tensor([ids])).logits[0]

    def round_plain(self, dtype: torch.dtype) -> None:
        """Give what is not packed, ours and theirs, the values of a checkpoint in dtype."""
        for w in self.weights.values():
            if isinstance(w, torch.Tensor):
                w.copy_(w.to(dtype))
        for name, p in self.theirs.named_parameters():
            if isinstance(self.weights[name], torch.Tensor):  # which may be a copy, as of gpt-oss's biases
                p.copy_(p.to(dtype))
