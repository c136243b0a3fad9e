"""Checkpoint -> artifact: plan everything from headers, then stream units through, manifest last."""

from __future__ import annotations

import fnmatch
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from tutel_pack.artifact import MANIFEST, Entry, FileWriter, Manifest, describe_file, lay_out, write_manifest
from tutel_pack.convert.dialects import find_weights
from tutel_pack.convert.families import Target, find_family, fit, match
from tutel_pack.convert.headers import read_index
from tutel_pack.convert.layout import Unit, entry_for, units
from tutel_pack.convert.output import check_output, output_folder
from tutel_pack.convert.pack import Loss, pack_unit, read_unit, shared_scales
from tutel_pack.convert.source import Source, open_source
from tutel_pack.errors import InputError
from tutel_pack.quant.recipe import Recipe
from tutel_pack.spec import ModelSpec

COPIED = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer*.model", "tokenizer.model.v*",
    "special_tokens_map.json", "added_tokens.json", "vocab*.json", "vocab*.txt", "merges.txt", "*.tiktoken",
    "chat_template*.jinja", "chat_template*.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files of the top level that are copied as they are. Nothing that could be run is among them."""
MOST_WORKERS = 4
"""Units that are at work at once: what bounds memory. Each is read, encoded and written by one thread."""
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Job:
    """A planned conversion: nothing is read of the weights yet, and nothing is written.

    entries: canonical name -> Entry, in file order.  copied: names of small files to copy.
    """

    source: Source
    spec: ModelSpec
    recipe: Recipe
    targets: list[Target]
    entries: dict[str, Entry]
    skipped: dict[str, str]
    copied: list[str]

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that will be read."""
        stored = {p.stored.name: p.stored.nbytes for t in self.targets for row in t.pieces for p in row}
        return sum(stored.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of the artifact's files, but for packed.json."""
        files = [lay_out(stored_tensors(list(group)))[2] for _, group in self.files()]
        return sum(files) + sum(self.source.files[name] for name in self.copied)

    def files(self) -> Iterator[tuple[str, Iterator[tuple[str, Entry]]]]:
        """File name -> its (canonical name, Entry) pairs, in order."""
        return groupby(self.entries.items(), key=lambda item: item[1].file)


def stored_tensors(entries: list[tuple[str, Entry]]) -> dict:
    """What a file holds, as FileWriter wants it."""
    return {stored: part for name, entry in entries for stored, part in entry.stored(name).items()}


def plan(model: str, recipe: Recipe, revision: str | None = None) -> Job:
    """Plan a conversion from headers alone. model: a folder or a Hub id.

    InputError for anything that would not convert: unknown model type or quantization, missing, unknown or misshapen
    tensors, broken files. ResourceError if the Hub cannot be reached.
    """
    folder = os.path.expanduser(model)
    if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "config.json")):  # before all that is below is listed
        raise InputError(f"{model} has no config.json: name a checkpoint in Hugging Face format.")
    source = open_source(model, revision)
    if MANIFEST in source.files:
        raise InputError(f"{source.name} is a packed artifact already: run it with tutel-run, or convert what it was made from.")
    if "config.json" not in source.files:
        raise InputError(f"{source.name} has no config.json: name a checkpoint in Hugging Face format.")
    config = source.read_json("config.json")
    if not isinstance(config, dict):
        raise InputError(f"config.json in {source.name} is not a JSON object: {source.remedy}.")
    family = find_family(config)
    weights = find_weights(read_index(source), config)
    spec = fit(family, family.spec(config), weights)
    targets, skipped = match(family, spec, weights)
    recipe.check_overrides({t.name: t.tensor.role for t in targets})
    entries = {t.name: entry_for(t, recipe) for t in targets}
    top = [name for name in sorted(source.files) if "/" not in name and name.isprintable()]
    copied = [name for name in top if any(fnmatch.fnmatchcase(name, p) for p in COPIED)]
    return Job(source, spec, recipe, targets, entries, skipped, copied)


def default_output(model: str, fmt: str) -> Path:
    """NAME-FMT in the working directory, NAME being the last part of the folder or Hub id."""
    path = os.path.expanduser(model)
    name = os.path.basename(os.path.abspath(path)) if os.path.exists(path) else model.split("/")[-1]
    return Path(f"{name}-{fmt}")


def convert_checkpoint(
    model: str,
    output: str | os.PathLike | None = None,
    *,
    fmt: str = "mxfp4",
    rest: str | None = None,
    overrides: tuple[tuple[str, str], ...] = (),
    scales: str | None = None,
    revision: str | None = None,
    force: bool = False,
) -> Path:
    """Convert a checkpoint (a folder or a Hub id) and return the artifact's folder.

    fmt: of the experts; rest: of attention, dense MLPs and head; overrides: (regular expression, format) pairs;
    scales: a scale rule. force: replace an artifact that is there already.
    Raises InputError and ResourceError, each with one sentence; a failed conversion leaves nothing behind.
    """
    output = Path(output) if output is not None else default_output(model, fmt)
    check_output(output, force)
    return run(plan(model, Recipe(fmt, rest, tuple(overrides), scales), revision), output, force)


def run(job: Job, output: Path, force: bool = False, progress: Callable[[str, int], None] = lambda file, read: None) -> Path:
    """Carry out a planned conversion. progress: called with the file at work and the bytes read since the last call."""
    with output_folder(output, force, job.bytes_written) as folder:
        _fill(job, folder, progress)
    return output


def _fill(job: Job, folder: Path, progress: Callable[[str, int], None]) -> None:
    errors: dict[str, dict] = {}
    with _workers() as workers, ThreadPoolExecutor(1) as digester:
        facts: dict[str, Future] = {}
        try:
            for file, group in job.files():
                entries = list(group)
                with FileWriter(folder / file, stored_tensors(entries)) as writer:
                    losses = _pack(job, entries, writer, workers, lambda n: progress(file, n))
                errors |= {name: _summary(job.entries[name], found) for name, found in losses.items()}
                facts[file] = digester.submit(describe_file, folder / file)
        except BaseException:
            job.source.close()  # workers may be waiting for the Hub, and they are waited for
            raise
        finally:
            workers.shutdown(cancel_futures=True)
        for name in job.copied:
            _copy(job.source, name, folder / name)
            facts[name] = digester.submit(describe_file, folder / name)
        files = {name: f.result() for name, f in facts.items()}
    source = {"repo": job.source.name, "commit": job.source.commit}
    write_manifest(folder, Manifest(source, job.spec, job.recipe.to_json(), job.entries, files, errors, job.skipped))


def _copy(source: Source, name: str, path: Path) -> None:
    with open(path, "wb") as f:
        for start in range(0, source.files[name], _COPY_BYTES):
            f.write(source.read(name, start, min(start + _COPY_BYTES, source.files[name])))
        f.flush()
        os.fsync(f.fileno())


def _pack(job: Job, entries: list[tuple[str, Entry]], writer: FileWriter, workers, progress) -> dict[str, list[tuple[int, Loss]]]:
    """Pack all units of a file's tensors. Returns tensor -> (expert, Loss) of what was not kept as it is."""
    targets = {target.name: target for target in job.targets}
    running = [(name, future) for name, entry in entries for future in _submit(job, targets[name], entry, writer, workers)]
    losses = defaultdict(list)
    for name, future in running:
        read, found = future.result()
        if found:
            losses[name] += found
        progress(read)
    return losses


def _submit(job: Job, target: Target, entry: Entry, writer: FileWriter, workers) -> Iterator[Future]:
    work = list(units(target, entry))
    shared = shared_scales(job.source, work, entry.format) if entry.format and entry.format.has_global else {}
    rule = job.recipe.rule_for(entry.format) if entry.format else None

    def pack(unit: Unit) -> tuple[int, list[tuple[int, Loss]]]:
        rows = read_unit(job.source, unit)
        return sum(r.nbytes for r in rows), pack_unit(unit, entry, rows, writer, rule, shared.get(unit.expert))

    for unit in work:
        yield workers.submit(pack, unit)


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that encode a unit each. Inside a unit torch gets one: its operations are too short to be shared out."""
    threads = torch.get_num_threads()
    count = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as workers:
            yield workers
    finally:
        torch.set_num_threads(threads)


def _summary(entry: Entry, losses: list[tuple[int, Loss]]) -> dict:
    """Relative root-mean-square error of a tensor, and its worst expert's; or that it is exact, whatever sums would say."""
    if all(loss.exact for _, loss in losses):
        return {"rms": 0.0, "exact": True}
    experts = math.prod(entry.shape[:-2])
    error, energy = torch.zeros(2, experts, dtype=torch.float64)
    for expert, loss in losses:
        error[expert] += loss.error
        energy[expert] += loss.energy
    tiny = torch.finfo(torch.float64).tiny  # what is all zeros has no error either
    rms = float((error.sum() / energy.sum().clamp(min=tiny)).sqrt())
    if experts == 1:
        return {"rms": _rounded(rms)}
    relative = (error / energy.clamp(min=tiny)).sqrt()
    worst = int(relative.argmax())
    return {"rms": _rounded(rms), "worst_expert": worst, "worst_rms": _rounded(float(relative[worst]))}


def _rounded(value: float) -> float:
    """To what does not depend on the order in which a processor adds up."""
    return float(f"{value:.6g}")
