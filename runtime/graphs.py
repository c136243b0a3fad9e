"""The decoding step as graphs: its launches recorded once, for 1, 2, 4, … sequences, and replayed by the device alone.

A recorded launch keeps its arguments. So all that changes from step to step is in buffers that stay where they are, a
batch is filled up with sequences that nobody asked for, grids are those of the longest sequences there can be, and
nothing may ask the host. What fills a batch up sees one position, that of a block which nobody else has, and no expert;
its states are in a slot of its own, too.

`Step` is everything but the recording, and runs on any device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutel_pack.kernels.ops import FlatLayout, Layout
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.decoder import Decoder

_log = logging.getLogger(__name__)

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}

Replay = Callable[[], Tensor]


class HostNeeded(Exception):
    """A step does what no graph can hold. The message says what that is."""


class NoHost(TorchDispatchMode):
    """While it is on, an operation that waits for the device, or copies between it and the host, is a HostNeeded."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if _waits(func, args) or len(_devices(func, tensors, kwargs)) > 1:
            raise HostNeeded(f"{func} needs the host")
        return func(*args, **kwargs)


def _waits(func, args: tuple) -> bool:
    """Whether the host must know a value: a number, or how many there are."""
    if func.overloadpacket in _INDEXING:  # which waits for masks alone
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _WAITS.isdisjoint(func.tags)


def _devices(func, tensors: list[Tensor], kwargs: dict) -> set[str]:
    """Kinds of devices that meet in an operation. Single numbers from the host are arguments of a launch, unless they
    are copied."""
    copies = func.overloadpacket in _COPIES
    found = {t.device.type for t in tensors if copies or t.ndim or t.device.type != "cpu"}
    return found | ({torch.device(kwargs["device"]).type} if found and kwargs.get("device") else set())


class _OnDevice(Sequence):
    """As many numbers, or tables, that the host does not have."""

    def __init__(self, size: int, what: str):
        self._size, self._what = size, what

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):
        raise HostNeeded(f"an operation asks the host for the {self._what} of sequences")


class Step:
    """The decoding step of `size` sequences, one new token each.

    most: blocks of the longest one.  spare, slot: a block and a slot of the cache for what fills the batch up.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, size: int, most: int, spare: int, slot: int = 0):
        self._decoder, self._cache, self._spare, self._slot = decoder, cache, spare, slot
        kind = {"dtype": torch.int64, "pin_memory": decoder.device.type == "cuda"}
        self._host = torch.empty(6, size, **kind), torch.full((size, most), spare, **kind)
        self._numbers, self._tables = (torch.empty_like(t, device=decoder.device, pin_memory=False) for t in self._host)
        self._copied = torch.cuda.Event() if decoder.device.type == "cuda" else None
        self._rows: list[Sequence[int]] = [()] * size
        self._layout = self._make_layout(size, most)
        self.fill([], [], [], [])

    def _make_layout(self, size: int, most: int) -> Layout:
        _, _, lengths, slots, states, _ = self._numbers
        starts = torch.arange(size + 1, device=slots.device)
        on_device = _OnDevice(size, "lengths"), _OnDevice(size, "blocks")
        unused = torch.empty(size, dtype=torch.bool, device=slots.device)
        layout = Layout(range(size + 1), *on_device, slots, states if self._decoder.stateful else None, unused)
        # What a Layout makes of lengths and tables that the host knows.
        vars(layout)["flat"] = FlatLayout(starts, lengths, self._tables.view(-1), starts[:-1] * most, most)
        return layout

    def fill(
        self, tokens: Sequence[int], past: Sequence[int], tables: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> None:
        """Take a batch of at most `size`: new tokens, the positions that each sequence has in the cache already, the
        blocks that it has there, and its state slot. Waits until the numbers of the last one have been copied."""
        block, missing = self._cache.block_size, len(self._rows) - len(tokens)
        places = [table[p // block] * block + p % block for p, table in zip(past, tables)]
        rows = (
            (tokens, 0), (past, 0), ([p + 1 for p in past], 1), (places, self._spare * block), (slots, self._slot),
            ([0] * len(tokens), 1),
        )  # fmt: skip
        numbers, blocks = self._host
        if self._copied:
            self._copied.synchronize()
        numbers.copy_(torch.tensor([[*row, *[other] * missing] for row, other in rows]))
        self._numbers.copy_(numbers, non_blocking=True)
        if self._write([*tables, *[[self._spare]] * missing]):
            self._tables.copy_(blocks, non_blocking=True)
        if self._copied:
            self._copied.record(torch.cuda.current_stream(self._decoder.device))

    def _write(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether any table is not what it was at the last step."""
        changed = [i for i, table in enumerate(tables) if self._rows[i] != table]
        for i in changed:
            self._host[1][i, : len(tables[i])] = torch.tensor(tables[i])
            self._rows[i] = list(tables[i])
        return bool(changed)

    def run(self) -> Tensor:
        """float32 logits [size, vocab]; the first rows are those of the batch. Nothing here waits for the device."""
        tokens, positions, *_, unused = self._numbers
        torch.ne(unused, 0, out=self._layout.unused)
        return self._decoder.step(tokens, positions, self._layout, self._cache)


def record(run: Replay, pool, stream: torch.cuda.Stream) -> Replay:
    """What replays the launches of `run` as they are now. HostNeeded if that cannot be.

    pool: of the memory that they use, which graphs share: none runs beside another, and what one leaves behind is not
    needed any more when the next one runs.  stream: to record on. Graphs that share one share cuBLAS's workspace, too.
    """
    run()  # makes what is made when first asked for, such as kernels
    with NoHost():
        run()
    with torch.cuda.device(stream.device):
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = run()
        except RuntimeError as e:  # what NoHost cannot see, such as a library that waits
            torch.cuda.set_stream(before)  # which torch leaves to captures that end well
            raise HostNeeded(f"the device's driver refuses it: {str(e).splitlines()[0]}") from e

    def replay() -> Tensor:
        with torch.cuda.device(stream.device):
            graph.replay()
        return logits

    return replay


class Graphs:
    """The steps of one decoder over one cache after another, each recorded when it is first needed."""

    def __init__(self, decoder: Decoder, record: Callable[..., Replay] = record):
        self._decoder, self._record, self._possible = decoder, record, True
        self.unbind()

    @classmethod
    def of(cls, decoder) -> Graphs | None:
        """None where there are no graphs, with the reason in the log where one might expect them."""
        device = torch.device(decoder.device)
        if device.type != "cuda":
            return None
        if reason := obstacle(decoder):
            _log.warning("decoding without graphs: %s", reason)
            return None
        return cls(decoder)

    def bind(self, cache: PagedCache, most: int) -> None:
        """Take another cache, and one block and slot of it; most: blocks that a sequence may have there."""
        (spare,), slot = cache.allocate(1), cache.allocate_slot()
        self._bound = cache, most, spare, slot
        self._forget()

    def unbind(self) -> None:
        """Let go of the cache, and of the graphs that are made for it."""
        self._bound, self._states, self._steps, self._pool = None, None, {}, None

    def _forget(self) -> None:
        """Let go of all graphs, and of their pool, which torch closes with the last one."""
        self._states, self._steps = self._bound[0].sequences, {}
        self._pool = torch.cuda.graph_pool_handle() if self._decoder.device.type == "cuda" else None

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        device = self._decoder.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def forward(
        self, tokens: Sequence[int], past: Sequence[int], tables: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> Tensor | None:
        """float32 logits [S, vocab] of one new token for each sequence, valid until the next call; see Step.fill. None
        if this decoder's step cannot be recorded, which the log then says."""
        size = 1 << (len(tokens) - 1).bit_length()
        if self._states is not self._bound[0].sequences:  # which are other tensors when they have grown
            self._forget()
        if self._possible and size not in self._steps:
            self._add(size)
        if not self._possible:
            return None
        step, replay = self._steps[size]
        step.fill(tokens, past, tables, slots)
        return replay()[: len(tokens)]

    def _add(self, size: int) -> None:
        cache, most, spare, slot = self._bound
        step = Step(self._decoder, cache, size, most, spare, slot)
        try:
            self._steps[size] = step, self._record(step.run, self._pool, self._stream)
        except HostNeeded as e:
            _log.warning("decoding without graphs: %s", e)
            self._possible = False


def obstacle(decoder) -> str:
    """Why there can be no graphs, empty if nothing is known that speaks against them."""
    if not isinstance(decoder, Decoder):
        return "the model runs through its transformers module"
    return "" if decoder.backend == "triton" else f"the backend {decoder.backend} waits for the device"
