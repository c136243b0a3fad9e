"""Weights by canonical name, checked against the shape that the model's description asks for and put on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tutel_pack.errors import InputError
from tutel_pack.kernels.ops import Weight
from tutel_pack.spec import ModelSpec
from tutel_pack.tensors import canonical_tensors


class Weights:
    """load: canonical name -> weight on any device. One that is on `device` already is not copied."""

    def __init__(self, load: Callable[[str], Weight], spec: ModelSpec, device: torch.device):
        self._load, self._device = load, device
        self._shapes = {name: tensor.shape for name, tensor in canonical_tensors(spec).items()}

    def __call__(self, name: str) -> Weight:
        """InputError if the weight has another shape than the spec says."""
        weight, shape = self._load(name), self._shapes[name]
        if tuple(weight.shape) != shape:
            raise InputError(
                f"{name} has shape {tuple(weight.shape)} where the model's description asks for {shape}: convert again."
            )
        return weight.to(self._device)
