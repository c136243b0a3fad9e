"""The folder of the latest conversion, so that `tutel-run generate PROMPT` needs no artifact's name."""

from __future__ import annotations

import os
from pathlib import Path


def remember(folder: str | os.PathLike) -> None:
    """Note `folder` as the latest conversion. A home that cannot be written is no failure of a conversion: ignored."""
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.write_bytes(os.fsencode(os.path.abspath(folder)))
        draft.replace(file)
    except (OSError, RuntimeError):
        pass


def recall() -> Path | None:
    """The folder that was remembered last, which may be gone by now, or None."""
    try:
        return Path(os.fsdecode(_file().read_bytes()))
    except (OSError, RuntimeError):
        return None


def _file() -> Path:
    """RuntimeError where the user has no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # as its specification asks: an empty or relative one does not count
        state = Path.home() / ".local" / "state"
    return state / "tutel-pack" / "latest"
