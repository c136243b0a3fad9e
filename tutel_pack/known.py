"""Descriptions of well-known models, from their makers' config.json: what kernels are tuned for, and what plans can be
made of without a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace

from tutel_pack.errors import InputError
from tutel_pack.spec import Attention, ClampedSwiglu, Indexer, Layer, Mla, Mlp, ModelSpec, Moe, Rope, Router, Yarn


def known_model(name: str) -> ModelSpec:
    """In any case of letters. InputError lists the names."""
    for known, spec in KNOWN.items():
        if known.lower() == name.lower():
            return spec
    raise InputError(f"Unknown model {name!r}: choose one of {', '.join(KNOWN)}, or name an artifact's folder.")


def _deepseek_v3() -> ModelSpec:
    yarn = Yarn(40.0, 4096, 32.0, 1.0, True, 1.0)
    scale = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    mla = Mla(128, 1536, 512, 128, 128, Rope(1e4, 64, True, yarn), scale)
    router = Router("sigmoid", correction=True, groups=8, top_groups=4, scale=2.5)
    moe = Moe(256, 8, 2048, router, shared=Mlp(2048))
    layers = (Layer(mla, Mlp(18432)),) * 3 + (Layer(mla, moe),) * 58
    return ModelSpec("deepseek_v3", 7168, 129280, 163840, 1e-6, False, layers, mtp=(Layer(mla, moe),))


def _kimi_k2() -> ModelSpec:
    yarn = Yarn(32.0, 4096, 1.0, 1.0, True, 1.0)
    scale = 192**-0.5 * (0.1 * math.log(32) + 1) ** 2
    mla = Mla(64, 1536, 512, 128, 128, Rope(5e4, 64, True, yarn), scale)
    router = Router("sigmoid", correction=True, scale=2.827)
    moe = Moe(384, 8, 2048, router, shared=Mlp(2048))
    layers = (Layer(mla, Mlp(18432)),) + (Layer(mla, moe),) * 60
    return ModelSpec("deepseek_v3", 7168, 163840, 131072, 1e-6, False, layers)


def _glm_5() -> ModelSpec:
    rope = Rope(1e6, 64, True)
    mla = Mla(64, 2048, 512, 192, 256, rope, 256**-0.5, indexer=Indexer(32, 128, 2048, rope))
    moe = Moe(256, 8, 2048, Router("sigmoid", correction=True, scale=2.5), shared=Mlp(2048))
    layers = (Layer(mla, Mlp(12288)),) * 3 + (Layer(mla, moe),) * 75
    return ModelSpec("glm_moe_dsa", 6144, 154880, 202752, 1e-5, False, layers, mtp=(Layer(mla, moe),))


def _qwen3(hidden: int, depth: int, heads: int, intermediate: int) -> ModelSpec:
    attention = Attention(heads, 4, 128, Rope(1e6, 128), qk_norm="head")
    layers = (Layer(attention, Moe(128, 8, intermediate)),) * depth
    return ModelSpec("qwen3_moe", hidden, 151936, 40960, 1e-6, False, layers)


def _gpt_oss(experts: int, depth: int) -> ModelSpec:
    yarn = Yarn(32.0, 4096, 32.0, 1.0, False, 0.1 * math.log(32) + 1)
    far = Attention(64, 8, 64, Rope(1.5e5, 64, False, yarn), bias="qkvo", sinks=True)
    near = replace(far, window=128)
    router = Router("softmax_chosen", bias=True, renormalize=False)
    moe = Moe(experts, 4, 2880, router, activation=ClampedSwiglu(7.0, 1.702, 1.0), bias=True)
    layers = (Layer(near, moe), Layer(far, moe)) * (depth // 2)
    return ModelSpec("gpt_oss", 2880, 201088, 131072, 1e-5, False, layers, names=(("router", "mlp.router"),))


KNOWN = {
    "DeepSeek-V3": _deepseek_v3(),
    "Kimi-K2": _kimi_k2(),
    "GLM-5": _glm_5(),
    "Qwen3-235B-A22B": _qwen3(4096, 94, 64, 1536),
    "Qwen3-30B-A3B": _qwen3(2048, 48, 32, 768),
    "gpt-oss-120b": _gpt_oss(128, 36),
    "gpt-oss-20b": _gpt_oss(32, 24),
}
