"""Wheel and editable installs from a fresh clone, and that the folder `kernels` hides no package of that name."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("convert.cli", "quant.codec", "kernels.ops", "kernels.triton.backend", "runtime.cli", "artifact")


def run(*command, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tracked files as a newcomer gets them, links as links."""
    folder = tmp_path_factory.mktemp("clone")
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", ".", ":!demo/model", cwd=ROOT)
    present = "\0".join(f for f in files.split("\0") if (ROOT / f).is_symlink() or (ROOT / f).is_file())
    tar = subprocess.run(["tar", "-c", "--null", "-T", "-"], input=present.encode(), capture_output=True, check=True, cwd=ROOT).stdout
    subprocess.run(["tar", "-x"], input=tar, check=True, cwd=folder)
    return folder


@pytest.fixture
def environment(tmp_path) -> Path:
    """An empty environment that sees this one's packages, but none of its links to this checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # A path line in a .pth file is not itself searched for .pth files, which is what keeps this checkout out.
    (site / "host.pth").write_text(sysconfig.get_paths()["purelib"])
    return tmp_path / "venv" / "bin"


def install(environment: Path, *what) -> None:
    python = environment / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", *what)


def check_installed(environment: Path, inside: Path, cwd: Path) -> None:
    script = f"import importlib, tutel_pack; [importlib.import_module('tutel_pack.' + m) for m in {MODULES}]; print(tutel_pack.__file__)"
    found = Path(run(environment / "python", "-c", script, cwd=cwd).strip())
    assert inside in found.resolve().parents
    for command in ("tutel-convert", "tutel-run"):
        assert command in run(environment / command, "--version", cwd=cwd)


@pytest.mark.slow
def test_wheel(clone, environment, tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, clone)
    (wheel,) = tmp_path.glob("*.whl")
    names = run(sys.executable, "-m", "zipfile", "-l", wheel)
    for module in MODULES:
        assert f"tutel_pack/{module.replace('.', '/')}.py" in names
    assert "tutel_pack/kernels/triton/tiles/sm_90.json" in names
    # A top-level package `kernels`, `quant`, … in a wheel would break other people's imports.
    tops = {line.split("/")[0] for line in names.splitlines()[1:]}
    assert all(top.startswith("tutel_pack") for top in tops), tops
    install(environment, wheel)
    check_installed(environment, tmp_path.resolve() / "venv", tmp_path)


@pytest.mark.slow
def test_editable(clone, environment, tmp_path):
    install(environment, "-e", clone)
    check_installed(environment, clone.resolve(), tmp_path)


def test_an_installed_kernels_package_wins_from_the_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("installed = True")
    script = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; assert kernels.installed"
    run(sys.executable, "-c", script, cwd=ROOT)


def test_transformers_sees_no_kernels_package_in_the_root():
    installed = any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions())
    script = "from transformers import Qwen3MoeForCausalLM; from transformers.utils import is_kernels_available as a; print(a())"
    assert run(sys.executable, "-c", script, cwd=ROOT).strip() == str(installed)
