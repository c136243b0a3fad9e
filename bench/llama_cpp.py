"""llama.cpp as a peer: its programs and its converter, from a source tree that was built, or from PATH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TYPES = {
    "mxfp4": ["MXFP4_MOE"],
    # Its quantizer has no name for it, but takes it for single tensors; the rest is Q8_0 as with MXFP4_MOE.
    "nvfp4": ["--tensor-type", "_exps=nvfp4", "MXFP4_MOE"],
    "fp8": ["Q8_0"],
    "bf16": ["BF16"],
}
"""Format -> arguments of llama-quantize for its nearest relative."""

_CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows tokenizers by what they make of a text
convert_hf_to_gguf.main()
"""


@dataclass(frozen=True)
class LlamaCpp:
    """bench, quantize: programs.  source: the folder of the converter, None where it is not known."""

    bench: Path
    quantize: Path
    source: Path | None

    @classmethod
    def find(cls, folder: Path | None) -> LlamaCpp | None:
        """In a folder (anywhere below it), else in PATH; None if it is not there."""
        bench, quantize = (_program(name, folder) for name in ("llama-bench", "llama-quantize"))
        converter = next(folder.rglob("convert_hf_to_gguf.py"), None) if folder else None
        return cls(bench, quantize, converter and converter.parent) if bench and quantize else None

    def make(self, checkpoint: Path, fmt: str, file: Path) -> None:
        """Write a checkpoint of the Hub as a GGUF file of that format."""
        if self.source is None:
            sys.exit(f"llama.cpp's converter is not known: give its source folder, or put {file} there.")
        plain = file.with_suffix(".bf16.gguf")
        # Its converter goes by the source tree's own gguf package.
        command = [sys.executable, "-c", _CONVERT, self.source, checkpoint, "--outtype", "bf16", "--outfile", plain]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": str(self.source / "gguf-py")})
        *options, name = TYPES[fmt]
        partial = file.with_suffix(".partial")
        subprocess.run([self.quantize, *options, plain, partial, name], check=True, stdout=sys.stderr)
        plain.unlink()
        partial.rename(file)

    def command(self, file: Path, threads: int, lengths: tuple[int, ...], tokens: int) -> list:
        """Prints JSON of one run for each length of a prompt, and one of `tokens` generated from nothing."""
        prompts = ",".join(map(str, lengths))
        return [self.bench, "-m", file, "-t", threads, "-p", prompts, "-n", tokens, "-r", 1, "-o", "json"]

    @staticmethod
    def rates(output: str) -> dict:
        """{"decode": [tokens/s], "prefill": {length: [tokens/s]}}"""
        runs = json.loads(output)
        return {
            "decode": [run["avg_ts"] for run in runs if run["n_gen"]],
            "prefill": {str(run["n_prompt"]): [run["avg_ts"]] for run in runs if run["n_prompt"]},
        }


def _program(name: str, folder: Path | None) -> Path | None:
    if folder is None:
        found = shutil.which(name)
        return Path(found) if found else None
    return next((path for path in folder.rglob(name) if path.is_file() and os.access(path, os.X_OK)), None)
