"""The native part of the build: kernels/cpu, optional, each instruction set compiled with its own flags."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # false alarms of gcc 12 about its own AVX-512 headers
AVX512 = ["-march=icelake-client", "-mprefer-vector-width=512"]  # loops of gcc are of 256 bits otherwise
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
COMMON = ["api", "threads", "products", "moe", "small_ops", "attention", "prefill", "latents", "index", "delta", "layer", "portable"]
SETS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {"neon": ["-fno-schedule-insns"]},  # which would keep more values at hand than there are registers
}


def flags(machine: str = platform.machine()) -> dict[str, list[str]]:
    """Source file -> what its compiler is told beside FLAGS."""
    own = SETS.get(machine, {})
    return {str(FOLDER / f"{name}.cpp"): own.get(name, []) for name in (*COMMON, *own)}


class BuildNative(build_ext):
    """A shared library behind a C interface: it has no init function, and serves every Python."""

    def build_extension(self, ext: Extension) -> None:
        objects = []
        for source, own in flags().items():
            objects += self.compiler.compile([source], self.build_temp, depends=ext.depends, extra_postargs=FLAGS + own)
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")

    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split("."))) + ".so"


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "tutel_pack.kernels.cpu.libtutel_pack_cpu",
                sources=list(flags()),
                depends=[str(path) for path in FOLDER.glob("*.h")],
                optional=True,
            )
        ]
        if sys.platform == "linux"
        else [],
        cmdclass={"build_ext": BuildNative},
    )
