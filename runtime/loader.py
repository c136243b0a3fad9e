"""From a packed artifact to a model that runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tutel_pack.artifact import Artifact
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.kernels.ops import ACTS, CPU_ACTS, Weight
from tutel_pack.kernels.threads import MOST, set_threads
from tutel_pack.runtime.batch import STEP_TOKENS, Batch
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.runtime.general import GeneralDecoder
from tutel_pack.runtime.residence import resident
from tutel_pack.spec import GENERAL, General, ModelSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What can be computed in."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

_log = logging.getLogger(__name__)


def load_packed(
    path: str | os.PathLike,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    act: str | None = None,
    threads: int | None = None,
    mlock: bool = False,
    prefault: bool = False,
) -> PackedModel:
    """Load a packed artifact. Its weights stay packed; on a CPU they stay in the mapped files, read when first used.

    device: "auto" takes a GPU if torch sees one, else the CPU.  dtype: of activations and the cache, bfloat16 if None.
    backend: the name of the kernels to run with, see kernels.ops.BACKENDS.
    act: quantize the activations of experts to "mxfp8", "nvfp4" or "fp8", for experts in the format that
        kernels.ops.ACTS names for it, on GPUs that multiply both as they are stored, or to "int8" on a CPU, for experts
        in mxfp4, nvfp4 or int4; None does not.
    threads: of the CPU's operations, in the whole process; None is OMP_NUM_THREADS, else all processors it may run on.
    prefault: read the weights now.  mlock: and keep them in memory. Both are for a CPU.
    InputError if `path` is no artifact, if it is damaged, or if an option is unknown; ResourceError if the device is
    not there or too small.
    """
    dtype = dtype or torch.bfloat16
    if dtype not in DTYPES:
        raise InputError(f"Cannot compute in {dtype}: choose one of {', '.join(map(str, DTYPES))}.")
    artifact, device = Artifact(path), _device(device)
    _check_act(artifact, act)
    if threads is not None:
        _set_threads(threads)
    load = _loader(artifact, device, mlock, prefault)
    try:
        decoder = _decoder(artifact, load, device, dtype, backend, act)
    except torch.OutOfMemoryError as e:
        raise ResourceError(f"{path} ({artifact.nbytes / 1e9:.1f} GB) does not fit into the memory of {device}.") from e
    model = PackedModel(artifact, decoder, act)
    _log.info("loaded %s on %s by the %s path, computing in %s", path, device, model.path, dtype)
    return model


def _check_act(artifact: Artifact, act: str | None) -> None:
    """InputError if no experts take activations so. Which names and devices there are, `get_ops` knows."""
    entries = artifact.manifest.tensors.values()
    found = sorted({e.format.name for e in entries if e.format is not None and len(e.shape) == 3})
    takers = CPU_ACTS[act] if act in CPU_ACTS else (ACTS[act],) if act in ACTS else ()
    if takers and not set(takers) & set(found):
        raise InputError(
            f"Activations in {act} are for experts in {' or '.join(takers)}, and those of {artifact.path} are in "
            f"{', '.join(found) or 'no packed format'}: leave act out, or choose another."
        )


def _set_threads(threads: int) -> None:
    if not isinstance(threads, int) or not 1 <= threads <= MOST:
        raise InputError(f"threads must be a whole number from 1 to {MOST}, not {threads!r}.")
    set_threads(threads)


def _loader(artifact: Artifact, device: torch.device, mlock: bool, prefault: bool) -> Callable[[str], Weight]:
    if not mlock and not prefault:
        return artifact.load
    if device.type != "cpu":
        raise InputError(f"mlock and prefault are for weights that stay in mapped files, not for those on {device}: leave them out.")
    return resident(artifact.load, lock=mlock)


def _decoder(
    artifact: Artifact, load: Callable[[str], Weight], device: torch.device, dtype: torch.dtype, backend: str,
    act: str | None,
) -> Decoder | GeneralDecoder:  # fmt: skip
    if not isinstance(artifact.spec, General):
        return Decoder(artifact.spec, load, device, dtype, backend, act)
    return GeneralDecoder(artifact.spec, _config(artifact.path), load, device, dtype, backend, act)


def _config(folder: Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"config.json in {folder} cannot be read ({e}): convert again.") from e
    if not isinstance(config, dict):
        raise InputError(f"config.json in {folder} is not a JSON object: convert again.")
    return config


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:  # whose message lists every kind of device that torch was ever built for
        raise InputError(f"There is no device {str(device)!r}: choose one such as 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type == "meta":
        raise InputError("The device 'meta' holds no values: choose one such as 'cpu', 'cuda' or 'cuda:1'.")
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as e:  # the ways torch refuses a device that it lacks
        reason = str(e).splitlines()[0].rstrip(".")
        raise ResourceError(f"Device {str(device)!r} cannot be used here ({reason}): try 'cpu'.") from e
    return device


class PackedModel:
    """A loaded artifact.

    artifact: the opened artifact.  decoder: the model itself, for ragged batches and caches that outlive a call.
    act: the format of the experts' activations, None if they are not quantized.
    """

    def __init__(self, artifact: Artifact, decoder: Decoder | GeneralDecoder, act: str | None = None):
        self.artifact, self.decoder, self.act = artifact, decoder, act

    @property
    def spec(self) -> ModelSpec | General:
        return self.decoder.spec

    @property
    def path(self) -> str:
        """"native", or "general" for a model that runs through its transformers module, which is slower."""
        return GENERAL if isinstance(self.spec, General) else "native"

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @cached_property
    def tokenizer(self):
        """The artifact's tokenizer (of transformers, which is imported now), or None if it has none.

        InputError if its files cannot be used without running code of their author's.
        """
        folder = self.artifact.path
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as e:  # transformers and tokenizers raise all kinds, plain Exception among them
            raise InputError(f"The tokenizer in {folder} cannot be loaded ({e}).") from e

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, S], all of equal length -> float32 logits [B, S, vocab] at every position.

        InputError for another dtype or shape, an id outside the vocabulary, or more positions than the model has.
        """
        self._check(input_ids)
        rows, length = input_ids.shape
        logits = torch.empty(rows, length, self.spec.vocab, device=self.device)
        if not logits.numel():
            return logits
        cache = self.decoder.new_cache(rows, block_size=length)
        tables, slots = [cache.allocate(1) for _ in range(rows)], [cache.allocate_slot() for _ in range(rows)]
        step = max(1, STEP_TOKENS // rows)
        for start in range(0, length, step):
            new = input_ids[:, start : start + step].tolist()
            batch = Batch.build(new, [start] * rows, tables, self.device, all_rows=True, slots=slots)
            logits[:, start : start + step] = self.decoder.forward(batch, cache).unflatten(0, (rows, -1))
        return logits

    def _check(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64 or input_ids.ndim != 2:
            is_tensor = isinstance(input_ids, Tensor)
            found = f"{input_ids.dtype} {list(input_ids.shape)}" if is_tensor else type(input_ids).__name__
            raise InputError(f"input_ids must be an int64 tensor [sequences, tokens], not {found}.")
        length, context = input_ids.shape[1], self.spec.context
        if length > context:
            raise InputError(f"{length} tokens are more than the model's context of {context}: shorten the input.")
        outside = input_ids[(input_ids < 0) | (input_ids >= self.spec.vocab)]
        if len(outside):
            raise InputError(f"Token id {outside[0].item()} is not in the vocabulary of {self.spec.vocab}.")

    def generate(self, prompts, **options):
        """Continue prompts: a text, token ids, or a list of either -> Result, or a list of them.

        options: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, and stream=True for an
        iterator of Events; see runtime.engine.generate and runtime.sampling.SamplingParams.
        """
        from tutel_pack.runtime import engine

        return engine.generate(self, prompts, **options)

    def chat(self, messages, **options):
        """Answer a user's text or a list of {"role", "content"}, by the model's chat template -> Result.

        options: system, and those of `generate`; see runtime.engine.chat.
        """
        from tutel_pack.runtime import engine

        return engine.chat(self, messages, **options)
