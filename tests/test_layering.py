"""Who may import whom (from the syntax tree): contract <- quant <- kernels <- runtime; convert stands beside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "contract": set(),
    "quant": {"contract"},
    "kernels": {"contract", "quant"},
    "runtime": {"contract", "quant", "kernels"},
    "convert": {"contract", "quant"},
}
CONTRACT_MODULES = {"artifact", "commands", "errors", "formats", "general", "known", "recent", "spec", "tensors"}
CONTRACT_PACKAGES = {"torch", "safetensors"}


def package(path: Path) -> str:
    folder = path.relative_to(ROOT).parts[0]
    return "contract" if folder == "tutel_pack" else folder


def sources() -> list[Path]:
    folders = ("tutel_pack", *(name for name in MAY_IMPORT if name != "contract"))
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # rglob does not follow the links in tutel_pack/, so each file stands in one package.
    assert len(found) > 20
    return found


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaches(package_name: str, names: set[str]) -> list[str]:
    found = []
    for name in names:
        top, _, rest = name.partition(".")
        if top in MAY_IMPORT:
            found.append(f"{name}: only tutel_pack.* may be imported")
        if top != "tutel_pack":
            continue
        inner = rest.split(".")[0]
        owner = inner if inner in MAY_IMPORT else "contract"
        if owner != package_name and owner not in MAY_IMPORT[package_name]:
            found.append(f"{name}: {package_name} may not import {owner}")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path):
    assert breaches(package(path), imports(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "package_name, line",
    [("convert", "from tutel_pack.runtime.loader import load_packed"), ("quant", "import tutel_pack.kernels.ops"),
     ("runtime", "from tutel_pack import convert"), ("contract", "from tutel_pack.quant.codec import decode"), ("runtime", "import kernels")],
)
def test_a_breach_is_noticed(package_name, line):
    assert breaches(package_name, imports(ast.parse(line)))


def test_the_contract_needs_torch_and_safetensors_only():
    for path in sorted((ROOT / "tutel_pack").glob("*.py")):
        assert path.stem in CONTRACT_MODULES | {"__init__"}, f"{path.stem} is new: name it above"
        outside = {n.split(".")[0] for n in imports(ast.parse(path.read_text()))} - sys.stdlib_module_names - {"tutel_pack"}
        # The commands' common face draws on click, and models without a description of our own on transformers, when asked for.
        assert outside <= CONTRACT_PACKAGES | {"commands": {"click"}, "general": {"transformers"}}.get(path.stem, set()), path


def test_huggingface_hub_has_one_home():
    users = {p for p in sources() if any(n.split(".")[0] == "huggingface_hub" for n in imports(ast.parse(p.read_text())))}
    assert users == {ROOT / "convert" / "source.py"}


def test_importing_builds_nothing_and_touches_no_gpu():
    names = [".".join(("tutel_pack", *p.relative_to(ROOT).with_suffix("").parts)).replace("tutel_pack.tutel_pack", "tutel_pack") for p in sources()]
    names = [n.removesuffix(".__init__") for n in names]
    script = f"""
import importlib, torch
torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(AssertionError("a GPU was touched"))
for name in {names!r}:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
