"""One engine in a process of its own, timed: `python bench/engines.py ours|transformers FOLDER [--threads N]`.

Prints one JSON object; bench/cpu.py runs this and puts it beside others. Tokens are timed one at a time after a short
prompt, and prompts as a whole until their first token, all by the clock on the wall. The limits of the machine are
measured between them, so that both meet the same neighbours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tutel_pack.artifact import Artifact, Manifest
from tutel_pack.kernels.cpu import native
from tutel_pack.runtime.engine import Engine
from tutel_pack.runtime.loader import load_packed
from tutel_pack.runtime.sampling import SamplingParams

SHORT = 16
"""Tokens of the prompt before tokens are timed one at a time."""
CHUNK = 16
"""Tokens timed between two readings of the mapping."""
CHUNKS = 4
MATMUL = 4096, 2048, 4096
"""Rows, inner dimension and columns of the product whose rate is the limit of prefill."""


def prompt(length: int, vocab: int) -> list[int]:
    """Some token ids, that are all different until the vocabulary ends."""
    return [3 + 7919 * i % (vocab - 3) for i in range(length)]


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


class Memory:
    """Bytes of this process's memory by kind, from /proc/self/status."""

    FIELDS = {"anonymous": "RssAnon", "file_backed": "RssFile", "shared": "RssShmem", "peak": "VmHWM"}

    @classmethod
    def now(cls) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        return {kind: sizes[field] for kind, field in cls.FIELDS.items()}


class Ours:
    """An artifact, run by the engine that tutel-run uses."""

    def __init__(self, folder: Path, threads: int):
        self.model = load_packed(folder, threads=threads)

    @property
    def vocab(self) -> int:
        return self.model.spec.vocab

    def first_token(self, tokens: list[int]) -> Callable[[], object]:
        """Runs a prompt; what it returns makes one more token each time it is called."""
        engine = Engine(self.model.decoder)  # without end tokens: random weights would say one some day
        engine.add(tokens, SamplingParams())
        while not engine.step():
            pass
        return engine.step

    @cached_property
    def limits(self) -> Limits:
        return Limits(self.model.artifact)

    def facts(self) -> dict:
        """What the rates have to be set against."""
        manifest = self.model.artifact.manifest
        return {
            "bytes_per_token": bytes_per_token(manifest),
            "artifact_bytes": self.model.artifact.nbytes,
            "flops": {length: flops(manifest, length) for length in LENGTHS},
        }


class Transformers:
    """A checkpoint in bfloat16, run by its transformers module."""

    limits = None

    def __init__(self, folder: Path, threads: int):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def first_token(self, tokens: list[int]) -> Callable[[], object]:
        state = {"input_ids": torch.tensor([tokens]), "past_key_values": None}

        @torch.inference_mode()
        def step() -> None:
            out = self.model(**state, use_cache=True, logits_to_keep=1)
            state.update(input_ids=out.logits.argmax(-1), past_key_values=out.past_key_values)

        step()
        return step

    def facts(self) -> dict:
        return {}


class Limits:
    """What the machine can do: reading the mapping of an artifact's layers, and multiplying in bfloat16."""

    def __init__(self, artifact: Artifact):
        names = [name for name, entry in artifact.manifest.tensors.items() if len(entry.shape) == 3]
        self._pieces = [artifact.load(name).data for name in names]
        self._next, self._read = 0, reader()
        rows, inner, columns = MATMUL
        self._x = torch.randn(rows, inner).bfloat16()
        self._w = torch.randn(columns, inner).bfloat16()

    def touch(self) -> None:
        """Read all of it once, so that no page is new to this process."""
        for piece in self._pieces:
            self._read(piece)

    def read(self) -> float:
        """GB/s of reading another layer's experts from the mapping, with all threads."""
        pieces = [self._pieces[(self._next + i) % len(self._pieces)] for i in range(2)]
        self._next += 2
        return sum(p.nbytes for p in pieces) / seconds(lambda: [self._read(p) for p in pieces]) / 1e9

    def multiply(self) -> float:
        """FLOP/s of torch's product, the best of a few."""
        return 2 * math.prod(MATMUL) / min(seconds(lambda: F.linear(self._x, self._w)) for _ in range(5))


def reader() -> Callable[[Tensor], object]:
    """Reads a tensor's memory with all threads: by the native kernels' own reader, or without them by torch."""
    return native.read if not native.missing() else lambda data: data.view(torch.int64).sum()


def bytes_per_token(manifest: Manifest) -> int:
    """What one token reads of an artifact: all but the embeddings that are not its own and the experts not chosen."""
    total = 0
    for name, entry in manifest.tensors.items():
        share = 1.0
        if name == "model.embed_tokens.weight" and not manifest.spec.tied_head:
            share = 1 / entry.shape[0]
        elif len(entry.shape) == 3 or name.endswith("_proj_bias"):
            moe = manifest.spec.layers[int(name.split(".")[2])].mlp
            share = moe.top_k / moe.experts
        total += share * entry.nbytes
    return round(total)


def flops(manifest: Manifest, length: int) -> float:
    """Multiplications and additions that a prompt of that length asks for: weights met by each token, the head by the
    last one, and causal attention."""
    spec, per_token = manifest.spec, 0.0
    for name, entry in manifest.tensors.items():
        if len(entry.shape) == 3:
            moe = spec.layers[int(name.split(".")[2])].mlp
            per_token += math.prod(entry.shape[1:]) * moe.top_k
        elif len(entry.shape) == 2 and name.startswith("model.layers.") and name.endswith(".weight"):
            per_token += math.prod(entry.shape)
    seen = sum(2 * a.heads * a.head_dim * _pairs(length, a.window) for a in (layer.attention for layer in spec.layers))
    return 2 * (length * per_token + seen + spec.vocab * spec.hidden)


def _pairs(length: int, window: int | None) -> int:
    """Queries and keys that see each other."""
    reach = min(length, window or length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


LENGTHS = 512, 4096
"""Of the prompts."""


def run(kind: type, folder: Path, threads: int) -> dict:
    before, start = Memory.now(), time.perf_counter()
    engine = kind(folder, threads)
    step = engine.first_token(prompt(SHORT, engine.vocab))
    load_seconds = time.perf_counter() - start
    if engine.limits:
        engine.limits.touch()
    decode = list(_decode(step, engine.limits))
    outside = outside_kernels(step) if kind is Ours and not native.missing() else None
    after_decode = Memory.now()
    prefill = {length: list(_prefill(engine, length)) for length in LENGTHS}
    return {
        "load_seconds": load_seconds,
        "decode": decode,
        "outside_kernels": outside,
        "prefill": prefill,
        "memory": {"imports": before, "decode": after_decode, "end": Memory.now()},
        **engine.facts(),
    }


@contextmanager
def native_calls() -> Iterator[list[float]]:
    """Seconds of every call of a native kernel, as they come."""
    from tutel_pack.kernels.cpu import backend

    spent: list[float] = []

    def timed(function: Callable) -> Callable:
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            spent.append(time.perf_counter() - start)
            return result

        return call

    functions = {name: f for name, f in vars(backend).items() if isinstance(f, ctypes._CFuncPtr)}
    vars(backend).update({name: timed(f) for name, f in functions.items()})
    yield spent
    vars(backend).update(functions)


def outside_kernels(step: Callable[[], object]) -> float:
    """The share of a token's time that is not spent in native kernels."""
    shares = []
    with native_calls() as spent:
        for _ in range(2 * CHUNK):
            spent.clear()
            total = seconds(step)
            shares.append(1 - sum(spent) / total)
    return statistics.median(shares)


def _decode(step: Callable[[], object], limits: Limits | None) -> Iterator[dict]:
    for _ in range(CHUNKS):
        reading = limits and limits.read()
        times = [seconds(step) for _ in range(CHUNK)]
        if limits:
            reading = (reading + limits.read()) / 2
        yield {"seconds": statistics.mean(times), "read_gb_per_s": reading}


def _prefill(engine, length: int) -> Iterator[dict]:
    for _ in range(max(1, 1024 // length)):
        rate = engine.limits and engine.limits.multiply()
        taken = seconds(lambda: engine.first_token(prompt(length, engine.vocab)))
        if rate:
            rate = (rate + engine.limits.multiply()) / 2
        yield {"seconds": taken, "matmul_flops_per_s": rate}


def main() -> None:
    jobs = {"ours": partial(run, Ours), "transformers": partial(run, Transformers)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=jobs)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(jobs[options.engine](options.folder, options.threads)))


if __name__ == "__main__":
    main()
