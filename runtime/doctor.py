"""What a machine has, and what an artifact needs of it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tutel_pack import __version__
from tutel_pack.artifact import Artifact
from tutel_pack.commands import size
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import missing
from tutel_pack.spec import GENERAL, ModelSpec

PACKAGES = ("torch", "transformers", "safetensors", "huggingface_hub", "triton")


def facts(folder: Path | None = None) -> dict[str, str | list[str]]:
    """Name -> what was found, in plain words, for a person or a bug report. folder: an artifact to look at as well.

    InputError if the folder is no artifact.
    """
    found: dict[str, str | list[str]] = {
        "tutel-pack": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "processor": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads",
        "accelerators": [_accelerator(i) for i in range(torch.cuda.device_count())] or "none that torch sees",
        "kernels": _kernels(),
    }
    return found if folder is None else found | _artifact_facts(Artifact(folder))


def _kernels() -> list[str]:
    """Backends, the one that is taken first."""
    gpus = [] if missing("triton", torch.device("cuda")) else ["triton (for GPUs)"]
    if reason := missing("cpu", torch.device("cpu")):
        return [*gpus, f"torch (no native ones: {reason})"]
    others = [name for name in native.available() if name != native.selected()]
    return [f"cpu ({native.selected()}; there are {', '.join(others)} too; {native.threads()} threads)", *gpus, "torch"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _accelerator(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"


def _artifact_facts(artifact: Artifact) -> dict[str, str]:
    native = isinstance(artifact.spec, ModelSpec)
    return {
        "artifact": f"{artifact.path}, {size(artifact.nbytes)}",
        "model": artifact.spec.family if native else artifact.spec.model_type,
        "path": "native" if native else f"{GENERAL}: through its transformers module, which is slower",
    }
