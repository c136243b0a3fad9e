"""The kernels at the tiles of the tables and at real layer shapes, to be compiled: nothing of them is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels.ops import ACTS, FlatLayout, Heads, Latent
from tutel_pack.kernels.triton.activations import quantizing
from tutel_pack.kernels.triton.aot import Compiled, compile_for
from tutel_pack.kernels.triton.attention import Queries, attending
from tutel_pack.kernels.triton.backend import routing
from tutel_pack.kernels.triton.chips import CHIPS, Chip
from tutel_pack.kernels.triton.heads import placing, placing_latents
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.matmul import Epilogue, Operand, Tiles, operand, problem_of, product, sorting, summing
from tutel_pack.kernels.triton.rows import norming, rotating
from tutel_pack.kernels.triton.tiles import TOKENS, Tile, tile_for
from tutel_pack.spec import ClampedSwiglu, Moe, Router, Swiglu

PACKED = ("mxfp4", "nvfp4", "int4", "fp8", "bf16")
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 128, 2048, 768, 8
"""Of Qwen3-30B-A3B. Other layers differ by numbers that are no constants of the kernels."""


@dataclass(frozen=True)
class Variant:
    """tile: of a product, None for other kernels."""

    name: str
    launch: Launch
    tile: Tile | None = None

    def int_ops_per_weight(self, chip: Chip, made: Compiled) -> float | None:
        """None for what decodes nothing."""
        return made.int_ops / self.weights_of_a_thread(chip) if self.tile else None

    def weights_of_a_thread(self, chip: Chip) -> float:
        """Decoded in a step along K, if every thread decodes what no other does."""
        return self.tile.bn * self.tile.bk / (chip.warp * self.tile.warps)

    def loads_of_a_thread(self, chip: Chip) -> float:
        """16 bytes each, in a step along K: of packed weights alone."""
        w, k = self.launch.arguments["w"], self.launch.arguments["K"]
        return self.weights_of_a_thread(chip) * w.shape[-1] * w.element_size() / k / 16


def all_variants(chip: Chip) -> dict[str, Variant]:
    """Everything there is, by name."""
    halves = gate_up(chip, "mxfp4", TOKENS[0], torch.float16)
    halves = replace(halves, name="gate_up mxfp4 16 float16")
    found = [*matmuls(chip), *quantized(chip), *others(chip), *attention(chip), clamped(chip), halves]
    return {v.name: v for v in found}


def compiled(chip_name: str, variant_name: str) -> Compiled:
    """One of `all_variants`: what a process of its own is asked for."""
    chip = CHIPS[chip_name]
    return compile_for(chip, all_variants(chip)[variant_name].launch)


def matmuls(chip: Chip, formats: tuple[str, ...] = PACKED, tokens: tuple[int, ...] = TOKENS) -> list[Variant]:
    """Both products of experts, of every format by every tile of the rule."""
    return [make(chip, fmt, bm) for make in (gate_up, down) for fmt in formats for bm in tokens]


def quantized(chip: Chip) -> list[Variant]:
    """Both products of experts with activations in few bits, and what makes these, where the chip has instructions for
    them."""
    found = []
    for act in chip.acts:
        found += [make(chip, ACTS[act], bm, act=act) for make in (gate_up, down) for bm in TOKENS]
        found.append(Variant(f"quantize {act}", quantizing(_meta(1, HIDDEN), act)[1]))
    return found


def gate_up(
    chip: Chip, fmt: str, bm: int, dtype: torch.dtype = torch.bfloat16, act: str | None = None
) -> Variant:
    w, pairs = _experts(fmt, 2 * INTERMEDIATE, HIDDEN, (INTERMEDIATE, INTERMEDIATE)), bm * EXPERTS
    x, out = _meta(pairs // TOP_K, HIDDEN, dtype=dtype), _meta(pairs, INTERMEDIATE, dtype=dtype)
    name = f"gate_up {act} x {fmt} {bm}" if act else f"gate_up {fmt} {bm}"
    return _variant(chip, name, x, w, out, Epilogue(activation=Swiglu()), act, gather=TOP_K)


def down(chip: Chip, fmt: str, bm: int, act: str | None = None) -> Variant:
    """With biases and routing weights, and its rows put where their pairs are."""
    w, pairs = _experts(fmt, HIDDEN, INTERMEDIATE, (HIDDEN,)), bm * EXPERTS
    epilogue = Epilogue(_meta(EXPERTS, HIDDEN), _meta(pairs, dtype=torch.float32))
    name = f"down {act} x {fmt} {bm}" if act else f"down {fmt} {bm}"
    return _variant(chip, name, _meta(pairs, INTERMEDIATE), w, _meta(pairs, HIDDEN), epilogue, act, scatter=True)


def others(chip: Chip) -> list[Variant]:
    """What is not a product of experts: a linear as decoding one token has it, heads, and kernels without a matrix
    instruction."""
    pieces = _meta(TOP_K, HIDDEN)
    matrix = operand(PackedTensor.empty(FORMATS["fp8"], (576, 7168), (576,), "meta"))
    tile = tile_for(chip, problem_of(matrix, 1, torch.bfloat16))
    linear, finish = product(chip, _meta(1, 7168), matrix, _meta(1, 576), tile, Epilogue())
    heads = [head(chip, fmt, tokens) for fmt in ("bf16", "fp8", "mxfp4", "nvfp4") for tokens in (1, 32)]
    ids, moe = _meta(1, TOP_K, dtype=torch.int64), Moe(512, 10, 512)
    grouped = Moe(256, 8, 2048, Router("sigmoid", correction=True, groups=8, top_groups=4))
    tiles = Tiles.empty(TOP_K, TOP_K, torch.device("meta"))
    return [
        *heads,
        Variant("linear fp8 16", linear, tile),
        Variant("finish", finish),
        Variant("sort_pairs", sorting(ids.view(-1), 512, 16, tiles)),
        Variant("sum_pieces", summing(pieces, ids, pieces[:1], EXPERTS)),
        Variant("route softmax 512", _routing(moe)),
        Variant("route grouped sigmoid 256", _routing(grouped)),
    ]


def head(chip: Chip, fmt: str, tokens: int) -> Variant:
    """The logits of a model's last states, which are float32 by then."""
    w, float32 = operand(PackedTensor.empty(FORMATS[fmt], (151936, HIDDEN), (151936,), "meta")), torch.float32
    tile = tile_for(chip, problem_of(w, tokens, float32))
    x, out = _meta(tokens, HIDDEN, dtype=float32), _meta(tokens, 151936, dtype=float32)
    (launch,) = product(chip, x, w, out, tile)
    return Variant(f"head {fmt} {tile.bm}", launch, tile)


def attention(chip: Chip) -> list[Variant]:
    """One sequence of 32768 positions: 8 query heads to a key head, as Qwen3 and Qwen3-Next have; 128 to the latents of
    DeepSeek-V3; the options of GLM-5 and gpt-oss; and what belongs to it."""
    grouped, merge = _attending(chip, 32, _meta(512, 64, 4, 128))
    latent, joined = _attending(chip, 128, _meta(512, 64, 1, 576), rank=512)
    sparse, _ = _attending(chip, 64, _meta(512, 64, 1, 576), rank=512, picks=_meta(1, 2048, dtype=torch.int64))
    near, *_ = _attending(chip, 64, _meta(512, 64, 8, 64), window=128, sinks=_meta(64))
    wide, _ = _attending(chip, 16, _meta(512, 64, 2, 256))
    angles = _meta(1, 32, dtype=torch.float32)
    return [
        Variant("attend 8 heads", grouped),
        Variant("attend 8 wide heads", wide),
        Variant("attend latents", latent),
        Variant("attend picked latents", sparse),
        Variant("attend window with sinks", near),
        Variant("merge", merge),
        Variant("merge latents", joined),
        Variant("rms_norm 7168", norming(_meta(1, 7168), _meta(7168), 1e-6, _meta(1, 7168))),
        Variant("add and rms_norm 7168", norming(_meta(1, 7168), _meta(7168), 1e-6, *[_meta(1, 7168)] * 3)),
        Variant("rms_norm 128", norming(_meta(32, 128), _meta(128), 1e-6, _meta(32, 128))),
        Variant("rope", rotating(_meta(1, 128, 64), (angles, angles), True, _meta(1, 128, 64))),
        Variant("place normed heads", _placing(32, 4, 128, 64, Heads(_meta(128), _meta(128), 1e-6))),
        Variant("place heads", _placing(64, 8, 64, 32, Heads())),
        Variant("place wide heads, a part turned", _placing(16, 2, 256, 32, Heads(_meta(256), _meta(256), 1e-6))),
        Variant("place latents", _placing_latents(128, 512, 64)),
    ]


def _placing(heads: int, kv_heads: int, d: int, half: int, how: Heads) -> Launch:
    q, k, v = (_meta(1, n * d) for n in (heads, kv_heads, kv_heads))
    pool, angles = _meta(512, 64, kv_heads, d), _meta(1, half, dtype=torch.float32)
    return placing(q, k, v, pool, pool, _meta(1, dtype=torch.int64), (angles, angles), how, _meta(1, heads, d))


def _placing_latents(heads: int, rank: int, turned: int) -> Launch:
    q, kv, angles = _meta(1, heads, 128 + turned), _meta(1, rank + turned), _meta(1, turned // 2, dtype=torch.float32)
    how = Latent(None, None, (q, None), (kv, None), _meta(rank), q, (q, None), 0.1, 1e-6, interleaved=True)
    pool, slots = _meta(512, 64, rank + turned), _meta(1, dtype=torch.int64)
    return placing_latents(q[..., 128:], kv, pool, slots, (angles, angles), how, _meta(1, heads, turned))


def _attending(chip: Chip, heads: int, keys: Tensor, rank: int | None = None, **how) -> list[Launch]:
    width = keys.shape[3]
    queries = Queries(_meta(1, heads, rank or width), _meta(1, heads, width - rank) if rank else None)
    numbers = [_meta(n, dtype=torch.int64) for n in (2, 1, 512, 1)]
    out, layout = _meta(1, heads, rank or width), FlatLayout(*numbers, most=512)
    return attending(chip, queries, keys, None if rank else keys, layout, out, 0.1, **how)


def clamped(chip: Chip) -> Variant:
    """gpt-oss's gate_up: clamped, with a bias."""
    w = _experts("mxfp4", 5760, 2880, (2880, 2880))
    epilogue = Epilogue(_meta(EXPERTS, 5760), None, ClampedSwiglu(7.0, 1.702, 1.0))
    return _variant(chip, "gate_up clamped mxfp4 16", _meta(16, 2880), w, _meta(64, 2880), epilogue, gather=4)


def _variant(
    chip: Chip, name: str, x: Tensor, w: Operand, out: Tensor, epilogue: Epilogue, act: str | None = None, **how
) -> Variant:
    problem = problem_of(w, len(out), out.dtype, act)
    tile = tile_for(chip, problem)
    x = quantizing(x, act)[0] if act else x
    tiles = Tiles.empty(len(out), problem.tiles, torch.device("meta"))
    launch, *_ = product(chip, x, w, out, tile, epilogue, _meta(len(out), dtype=torch.int64), tiles, **how)
    return Variant(name, launch, tile)


def _routing(moe: Moe) -> Launch:
    correction = _meta(moe.experts, dtype=torch.float32) if moe.router.correction else None
    ids, weights = _meta(1, moe.top_k, dtype=torch.int64), _meta(1, moe.top_k, dtype=torch.float32)
    return routing(_meta(1, moe.experts, dtype=torch.float32), moe, correction, ids, weights)


def _experts(fmt: str, n: int, k: int, segments: tuple[int, ...]) -> Operand:
    return operand(PackedTensor.empty(FORMATS[fmt], (EXPERTS, n, k), segments, "meta"))


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
