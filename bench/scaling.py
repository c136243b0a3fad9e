"""What a step of decoding costs as contexts and batches grow, as a picture: `python bench/cpu.py --plots DIR`.

Caches are filled with random keys and values instead of by running a prompt: what a step costs is the same.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.loader import PackedModel, load_packed

CONTEXTS = [1 << n for n in range(10, 16)]
BATCHES = [1 << n for n in range(6)]
SHORT = 128
"""Tokens that each sequence of a batch has behind it."""
ROUNDS, STEPS = 7, 3
BLOCK = 64


class Step:
    """One new token of each of `batch` sequences that have `context` tokens behind them."""

    def __init__(self, model: PackedModel, cache: PagedCache, context: int, batch: int):
        self._model, self._cache = model, cache
        blocks = context // BLOCK + 1
        self._tables = [list(range(s * blocks, (s + 1) * blocks)) for s in range(batch)]
        self._context, self._count = context, 0

    def run(self) -> float:
        """Milliseconds. Tokens differ from step to step, and so do the experts they pick."""
        count, vocab = len(self._tables), self._model.spec.vocab
        self._count += 1
        new = [[(7919 * (self._count * count + s)) % vocab] for s in range(count)]
        start = time.perf_counter()
        self._model.decoder.forward(Batch.build(new, [self._context] * count, self._tables), self._cache)
        return 1e3 * (time.perf_counter() - start)


def filled_cache(model: PackedModel) -> PagedCache:
    blocks = max(CONTEXTS[-1] // BLOCK + 1, BATCHES[-1] * (SHORT // BLOCK + 1))
    cache = model.decoder.new_cache(blocks, BLOCK)
    for layer in cache.tokens:
        for pool in layer.values():
            pool.normal_()
    return cache


def measure(steps: dict[int, Step]) -> dict[int, list[float]]:
    """Milliseconds of every step, all sizes in turn in each round."""
    for step in steps.values():
        step.run()
    times: dict[int, list[float]] = {size: [] for size in steps}
    for _ in range(ROUNDS):
        for size, step in steps.items():
            times[size] += [step.run() for _ in range(STEPS)]
    return times


def plot(artifact: Path, threads: int, name: str, folder: Path) -> None:
    """Write folder/cpu-NAME.svg, and the numbers in it as JSON beside it."""
    model = load_packed(artifact, device="cpu", threads=threads, prefault=True)
    cache = filled_cache(model)
    contexts = measure({n: Step(model, cache, n, 1) for n in CONTEXTS})
    batches = measure({n: Step(model, cache, SHORT, n) for n in BATCHES})
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"threads": threads, "context": contexts, "batch": batches}
    (folder / f"cpu-{name}.json").write_text(json.dumps(numbers, default=list))
    draw(f"{name}, {threads} thread{'s' * (threads > 1)}", contexts, batches, folder / f"cpu-{name}.svg")


def draw(title: str, contexts: dict[int, list[float]], batches: dict[int, list[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    figure.suptitle(f"Time of a decoding step: {title}")
    _line(left, contexts, "this engine")
    left.set(xlabel="tokens in the context", ylabel="milliseconds", xticks=CONTEXTS)
    left.set_xticklabels([f"{n // 1024}k" for n in CONTEXTS])
    _line(right, batches, "this engine")
    one = statistics.median(batches[1])
    right.plot(BATCHES, [one * n for n in BATCHES], ":", color="0.6", label="as many steps of one sequence")
    right.set(xlabel=f"sequences in the batch, {SHORT} tokens each", xticks=BATCHES)
    right.set_xticklabels(map(str, BATCHES))
    right.set_ylim(0, 1.5 * max(statistics.median(t) for t in batches.values()))
    right.legend(frameon=False)
    left.set_ylim(bottom=0)
    figure.savefig(file, metadata={"Date": None})


def _line(axes, times: dict[int, list[float]], label: str) -> None:
    """Medians, and the middle half of what was measured."""
    sizes, middle = list(times), [statistics.median(t) for t in times.values()]
    low, _, high = zip(*(statistics.quantiles(t, n=4) for t in times.values()))
    axes.set_xscale("log", base=2)
    axes.fill_between(sizes, low, high, alpha=0.2, linewidth=0)
    axes.plot(sizes, middle, "o-", markersize=4, label=label)
    for size, value in zip(sizes, middle):
        axes.annotate(f"{value:.0f}", (size, value), textcoords="offset points", xytext=(0, 6), ha="center")
    axes.minorticks_off()
