"""What `tutel-run plan` tells of a model: bounds on its speed, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tutel_pack.artifact import Artifact, Entry
from tutel_pack.commands import size
from tutel_pack.errors import InputError
from tutel_pack.kernels.triton.gpus import find_gpu
from tutel_pack.known import known_model
from tutel_pack.runtime.timing import GAP, RESERVE, Estimate, entries_of, estimate
from tutel_pack.spec import ModelSpec
from tutel_pack.tensors import canonical_tensors

POSITIONS = 4096
"""In the cache of a sequence, where nothing else is said."""


def estimates(
    model: str | Path, fmt: str, chips: Sequence[str], gpus: int, batch: int, context: int | None
) -> list[Estimate]:  # fmt: skip
    """model: the name of a known one, in format fmt, or the Path of an artifact. InputError for what cannot be."""
    if isinstance(model, Path):
        spec, entries = _of_artifact(model)
    else:
        if fmt == "source":
            raise InputError("The format of a known model must be named: fp8, mxfp4, nvfp4 or bf16.")
        spec = known_model(model)
        entries = entries_of(spec, fmt)
    context = context or min(POSITIONS, spec.context)
    if context > spec.context:
        raise InputError(f"--context {context} is more than the {spec.context} positions that the model has.")
    return [estimate(spec, entries, find_gpu(chip), gpus, batch, context) for chip in chips]


def _of_artifact(folder: Path) -> tuple[ModelSpec, dict[str, Entry]]:
    manifest = Artifact(folder).manifest
    if not isinstance(manifest.spec, ModelSpec):
        raise InputError(f"{folder} runs through its transformers module, and of that there is no model of time.")
    for name in canonical_tensors(manifest.spec):
        if name not in manifest.tensors:
            raise InputError(f"The artifact {folder} lacks the tensor {name}: convert again.")
    return manifest.spec, manifest.tensors


HEAD = f"{'chip':11}{'tokens/s':>10}  {'limited by':11}{'experts':>9}{'weights':>9}{'cache':>9}{'gaps':>9}  memory"


def line(e: Estimate) -> str:
    """Below HEAD: seconds of the parts in milliseconds."""
    chip = f"{e.gpus} x {e.gpu.name}" if e.gpus > 1 else e.gpu.name
    parts = "".join(f"{1e3 * seconds:9.3f}" for _, seconds in e.parts.values())
    fit = "fits" if e.fits else "does not fit"
    return f"{chip:11}{e.tokens_per_second:10.0f}  {e.limit:11}{parts}  {size(e.needed)} of {size(e.available)}: {fit}"


def caveats(found: Sequence[Estimate]) -> str:
    unproven = [e.gpu.name for e in found if e.gpu.measured is None]
    lines = [f"Uncalibrated, as no run on it has been recorded: {', '.join(unproven)}."] if unproven else []
    return "\n".join(
        [
            *lines,
            "Upper bounds, of all sequences together, from data sheets; parts in milliseconds of a step. Assumed: the",
            f"step is a captured graph with gaps of {1e6 * GAP:g} µs between kernels; experts are chosen evenly; work",
            f"is divided evenly among GPUs and nothing exchanged; {size(RESERVE)} of each GPU stay free.",
        ]
    )
