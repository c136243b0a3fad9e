"""What the compiler makes of the native kernels' sources."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUILD = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
OF_SETS = {source: own for source, own in BUILD["flags"]().items() if own}


def shared_functions(source: str, own: list[str], target: Path) -> list[str]:
    """Those of which the linker keeps one copy, whichever file it is from."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        pytest.skip("there is no g++ or nm to look at the sources with")
    command = ["g++", *BUILD["FLAGS"], *own, "-I", "kernels/cpu", "-c", source, "-o", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    symbols = subprocess.run(["nm", "-C", target], capture_output=True, text=True, check=True).stdout
    return [line for line in symbols.splitlines() if " W " in line]


@pytest.mark.parametrize("source", OF_SETS)
def test_an_instruction_set_shares_no_function(source, tmp_path):
    """A copy that was compiled for AMX would be called on processors that do not know its instructions."""
    assert shared_functions(source, OF_SETS[source], tmp_path / "set.o") == []


def test_a_shared_function_is_seen(tmp_path):
    source = tmp_path / "shared.cpp"
    source.write_text("[[gnu::noinline]] inline int f(int x) { return x; }\nint (*g)(int) = f;\n")
    assert len(shared_functions(str(source), [], tmp_path / "shared.o")) == 1
