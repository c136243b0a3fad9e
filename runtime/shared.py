"""What the attention blocks of one forward pass share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutel_pack.kernels.ops import Layout, Ops
from tutel_pack.spec import Rope


class Shared(dict):
    """Rope -> rotation of the batch's positions, computed when first asked for.

    picks: what the nearest indexer before picked (see Ops.top_positions), for the layers behind it that reuse it.
    """

    def __init__(self, positions: Tensor, layout: Layout, ops: Ops):
        super().__init__()
        self._positions, self._layout, self._ops = positions, layout, ops
        self.picks: Sequence[Tensor | None] = ()

    def __missing__(self, rope: Rope) -> tuple[Tensor, Tensor]:
        self[rope] = self._ops.rotation(self._positions, rope, self._layout)
        return self[rope]
