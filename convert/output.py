"""The artifact's folder: filled under a name of its own, and renamed when all is done. Nothing of a user's is ever lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tutel_pack.artifact import MANIFEST
from tutel_pack.errors import InputError, ResourceError

MARK = ".tutel-convert"
"""In a folder that a conversion fills: locked while it does, and a sign that what is left there may be deleted."""
_LACKING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def output_folder(output: Path, force: bool, needed: int) -> Iterator[Path]:
    """A folder to fill with `needed` bytes, which becomes `output` at the end of the block; after an error it is gone.

    Raises what check_output does; ResourceError if there is no space, InputError if it cannot be written.
    """
    check_output(output, force)
    place = _place(output)
    # A name of its own until all is done, beside the output so that the last step is a rename.
    partial = place.with_name(f"{place.name}.partial")
    with _storage_errors(output), _own_folder(partial):
        _check_space(place.parent, needed)
        yield partial
        check_output(output, force)  # much may have happened meanwhile
        _put(partial, place)


def check_output(output: Path, force: bool) -> None:
    """InputError if `output` cannot become an artifact: only an artifact is ever replaced, and only by force."""
    with _storage_errors(output):
        place = _place(output)
        if place.is_mount():
            raise InputError(f"{output} is a mount point, which cannot be renamed: name a folder in it, such as -o {output / 'packed'}.")
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            return
        strays = _strays(place)
    if strays is None:
        raise InputError(f"{output} exists and is not an artifact: name another place with -o.")
    if not force:
        raise InputError(f"{output} exists: replace it with --force, or name another place with -o.")
    if strays:
        raise InputError(f"{output} also holds what is not of the artifact, such as {strays[0]}: move it away, or name another place with -o.")


def _place(output: Path) -> Path:
    """Where an output really is: a link stays, and what it points to is written."""
    return Path(os.path.realpath(output))


def _strays(folder: Path) -> list[str] | None:
    """Files in a folder that its packed.json does not list; None if it is no artifact."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        own = {MANIFEST, MARK, *data["files"]} if {"schema", "tensors"} <= set(data) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return own and sorted(set(found) - own)


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """An empty folder that nobody else fills, gone in the end unless it was renamed.

    What a killed conversion left in its place is deleted; anything else there is an InputError.
    """
    mark = folder / MARK
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise InputError(f"{folder} is in the way and was not left by a conversion: move it, or name another place with -o.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(lock, folder)
        try:
            for left in folder.iterdir():
                if left != mark:
                    left.unlink()
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"Another conversion is writing {folder}: wait for it, or name another place with -o.") from None
    except OSError:  # some network file systems have no locks
        pass


def _put(partial: Path, place: Path) -> None:
    """Rename to the final name. An artifact there is moved aside first: a kill in between loses neither."""
    old = None
    if place.exists() and any(place.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f"{place.name}.old-", dir=place.parent))
        place.rename(old)
    partial.rename(place)
    (place / MARK).unlink()
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder} has {free / 1e9:.2f} GB free and the artifact needs {needed / 1e9:.2f} GB: free some space, or name another place with -o."
        )


@contextmanager
def _storage_errors(output: Path) -> Iterator[None]:
    """OSErrors as the failures of a user that they are. Sources turn their own into such before."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        if e.errno in _LACKING:
            raise ResourceError(f"No space left for {output} ({e.strerror}): free some, or name another place with -o.") from e
        if e.errno in (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise ResourceError(f"{output} cannot be written ({e.strerror}).") from e
        raise InputError(f"{output} cannot be written ({e.strerror or e}): name another place with -o.") from e
