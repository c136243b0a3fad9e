"""Weights by canonical name, checked against the shape that the model's description asks for and put on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import Weight
from tutel_pack.quant.codec import decode
from tutel_pack.spec import ModelSpec
from tutel_pack.tensors import canonical_tensors


class Weights:
    """load: canonical name -> weight on any device. One that is on `device` already is not copied.

    dtype: of activations.
    """

    def __init__(self, load: Callable[[str], Weight], spec: ModelSpec, device: torch.device, dtype: torch.dtype):
        self._load, self._device, self._dtype = load, device, dtype
        self._norm_offset = spec.norm_offset
        self._shapes = {name: tensor.shape for name, tensor in canonical_tensors(spec).items()}

    def __call__(self, name: str) -> Weight:
        """InputError if the weight has another shape than the spec says."""
        weight, shape = self._load(name), self._shapes[name]
        if tuple(weight.shape) != shape:
            raise InputError(
                f"{name} has shape {tuple(weight.shape)} where the model's description asks for {shape}: convert again."
            )
        return weight.to(self._device)

    def norm(self, name: str) -> Tensor:
        """The weight of an RMSNorm, with the offset that this model adds to them, in float32 where there is one."""
        weight = self(name)
        return weight.float() + self._norm_offset if self._norm_offset else weight

    def decoded(self, name: str) -> Tensor:
        """The weight in the dtype of activations, decoded if it is packed."""
        weight = self(name)
        return decode(weight, self._dtype) if isinstance(weight, PackedTensor) else weight.to(self._dtype)
