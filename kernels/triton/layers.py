"""Expert layers of real models: what tiles are tuned for and benches measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.known import KNOWN
from tutel_pack.spec import ClampedSwiglu, ModelSpec, Moe, Swiglu


@dataclass(frozen=True)
class ExpertLayer:
    """As many of `experts`, each of hidden × intermediate, as a token passes: top_k."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Swiglu | ClampedSwiglu = Swiglu()

    def weights(self, fmt: str, device: torch.device | str) -> tuple[PackedTensor, PackedTensor]:
        """(gate_up, down) of random bits under scales that keep the products of normal tokens finite."""
        e, h, i = self.experts, self.hidden, self.intermediate
        return _random(fmt, (e, 2 * i, h), (i, i), device), _random(fmt, (e, h, i), (h,), device)

    def used_experts(self, tokens: int) -> float:
        return used_experts(self.experts, self.top_k, tokens)

    def flops(self, tokens: int) -> float:
        return 6.0 * tokens * self.top_k * self.hidden * self.intermediate


def used_experts(experts: int, top_k: int, tokens: int) -> float:
    """As many different ones as random tokens use, on average."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _layer_of(spec: ModelSpec) -> ExpertLayer:
    moe = next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, Moe))
    return ExpertLayer(moe.experts, spec.hidden, moe.intermediate, moe.top_k, moe.activation)


LAYERS = {name.lower(): _layer_of(spec) for name, spec in KNOWN.items()}


def _random(fmt: str, shape: tuple[int, ...], segments: tuple[int, ...], device: torch.device | str) -> PackedTensor:
    w = PackedTensor.empty(FORMATS[fmt], shape, segments, device)
    if w.data.is_meta:
        return w
    if w.format.block is None:
        w.data.normal_(0, shape[-1] ** -0.5)
        return w
    bits = w.data.view(torch.uint8)
    for expert in bits:
        expert.copy_(torch.randint(0, 256, expert.shape, dtype=torch.uint8, device=device))
    if fmt == "fp8":
        bits[(bits & 0x7F) == 0x7F] = 0  # NaN
    w.scale.view(torch.uint8).fill_(120) if fmt == "mxfp4" else w.scale.fill_(0.01)
    if w.global_scale is not None:
        w.global_scale.fill_(1.0)
    return w


def random_routing(layer: ExpertLayer, tokens: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of tokens that each take top_k different experts."""
    ids = torch.rand(tokens, layer.experts, device=device).argsort(1)[:, : layer.top_k].contiguous()
    return ids, torch.full(ids.shape, 1 / layer.top_k, device=device)
