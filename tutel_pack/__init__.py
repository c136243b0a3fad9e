"""Pack Mixture-of-Experts checkpoints small, and run them fast."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_LAZY = {"load_packed": "tutel_pack.runtime.loader", "convert_checkpoint": "tutel_pack.convert.pipeline"}


__all__ = ["__version__", *_LAZY]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    # Sub-packages are imported on use, so that `import tutel_pack` stays instant.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
