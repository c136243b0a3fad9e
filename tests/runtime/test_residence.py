"""Threads, and weights that are read at once or locked: what the system says of the process then."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.models import Pair
from tutel_pack.artifact import Artifact
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.kernels.cpu import native
from tutel_pack.runtime import residence
from tutel_pack.runtime.loader import load_packed


@pytest.fixture
def artifact(tmp_path):
    """A new file for every test, so that no other mapping of it is left."""
    return Pair("mxfp4").write_artifact(tmp_path)


def pages(artifact: Path) -> dict[str, int]:
    """Bytes by kind of this process's mappings of the weights, as the system counts them."""
    total, inside = dict.fromkeys(("Size", "Rss", "Anonymous", "Locked"), 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if not rest.endswith(("kB", "B")) and "-" in line.split()[0]:
            inside = line.endswith(f" {artifact / 'base.safetensors'}")
        elif inside and name in total:
            total[name] += int(rest.split()[0]) * 1024
    return total


def stored_bytes(artifact: Path) -> int:
    return sum(entry.nbytes for entry in Artifact(artifact).manifest.tensors.values())


def test_nothing_is_copied_or_locked_unless_asked(artifact, monkeypatch):
    monkeypatch.setattr("tutel_pack.runtime.loader.resident", None)  # what reads or locks is not even called
    model = load_packed(artifact, device="cpu")
    found = pages(artifact)
    assert found["Size"] >= stored_bytes(artifact) and found["Anonymous"] == found["Locked"] == 0
    del model


def test_prefault_reads_all_and_copies_nothing(artifact):
    model = load_packed(artifact, device="cpu", prefault=True)
    found = pages(artifact)
    assert found["Rss"] >= stored_bytes(artifact) and found["Anonymous"] == found["Locked"] == 0
    del model


def test_mlock_locks_all_and_copies_nothing(artifact):
    model = load_packed(artifact, device="cpu", mlock=True)
    found = pages(artifact)
    assert min(found["Rss"], found["Locked"]) >= stored_bytes(artifact) and found["Anonymous"] == 0
    del model


def test_they_change_no_logits(artifact):
    ids = torch.arange(7)[None]
    plain, locked = (load_packed(artifact, device="cpu", mlock=mlock).forward(ids) for mlock in (False, True))
    assert torch.equal(plain, locked)


class Libc:
    """A system that refuses to lock, or that cannot populate."""

    def __init__(self, error: int = 0, advice: int = 0):
        self.advised, self._error, self._advice = [], error, advice

    def mlock2(self, first, size, flags):
        ctypes.set_errno(self._error)
        return -1 if self._error else 0

    def madvise(self, first, size, advice):
        self.advised.append(advice)
        return -1 if advice == self._advice else 0


def test_a_limit_on_locked_memory_is_named(artifact, monkeypatch):
    monkeypatch.setattr(residence.ctypes, "CDLL", lambda *_, **__: Libc(error=12))
    with pytest.raises(ResourceError, match=r"cannot be locked.*may lock \d+ MB.*raise `ulimit -l`"):
        load_packed(artifact, device="cpu", mlock=True)


def test_an_old_kernel_is_told_that_the_weights_come_soon(artifact, monkeypatch):
    libc = Libc(advice=22)
    monkeypatch.setattr(residence.ctypes, "CDLL", lambda *_, **__: libc)
    load_packed(artifact, device="cpu", prefault=True)
    assert libc.advised[:2] == [22, 3] and libc.advised.count(22) == libc.advised.count(3)


def test_a_system_without_mlock2_says_so(artifact, monkeypatch):
    monkeypatch.setattr(residence.ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(InputError, match="Only Linux"):
        load_packed(artifact, device="cpu", mlock=True)


def test_residence_is_for_cpus(artifact, monkeypatch):
    monkeypatch.setattr("tutel_pack.runtime.loader._device", torch.device)
    with pytest.raises(InputError, match="those on cuda: leave them out"):
        load_packed(artifact, device="cuda", prefault=True)


@pytest.fixture
def threads_as_before():
    yield
    native.set_threads(1)  # torch's are reset for every test


def test_threads_are_set_for_torch_and_native_kernels(artifact, threads_as_before):
    load_packed(artifact, device="cpu", threads=2)
    assert torch.get_num_threads() == native.threads() == 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", 1025, 10**20])
def test_threads_that_are_no_count(artifact, threads):
    with pytest.raises(InputError, match="threads must be a whole number from 1 to 1024"):
        load_packed(artifact, device="cpu", threads=threads)


@pytest.mark.parametrize("variable, expected", [("1", 1), ("2", 2), (None, 1)])
def test_threads_are_the_environments_or_all_there_are(artifact, variable, expected):
    """Of a process whose affinity is one processor, unless OMP_NUM_THREADS says otherwise."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if variable:
        environment["OMP_NUM_THREADS"] = variable
    script = f"""
import os
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import torch
from tutel_pack.kernels.cpu import native
from tutel_pack.runtime.loader import load_packed
load_packed({str(artifact)!r}, device="cpu")
print(torch.get_num_threads(), native.threads())
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected)] * 2
