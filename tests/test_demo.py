"""The trained demo model: quality by format, real text, and the README's commands as a newcomer runs them."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hub_server import HubServer
from tutel_pack import load_packed
from tutel_pack.convert.pipeline import convert_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
FACTS = json.loads((DEMO / "perplexity.json").read_text())


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return {fmt: convert_checkpoint(DEMO / "model", folder / fmt, fmt=fmt) for fmt in ("bf16", "fp8", "mxfp4", "nvfp4")}


def perplexity(artifact: Path) -> float:
    """Of demo/heldout.txt by the protocol of demo/README.md: whole windows, all but the first token of each scored."""
    model = load_packed(artifact, dtype=torch.float32)
    ids = model.tokenizer((DEMO / "heldout.txt").read_text(), return_tensors="pt").input_ids[0]
    windows = ids.split(FACTS["window"])
    loss = count = 0
    for window in windows:
        logits = model.forward(window[None])[0, :-1]
        loss += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    assert count == FACTS["tokens"]
    return math.exp(loss / count)


def test_perplexity_by_format(artifacts):
    found = {fmt: perplexity(artifact) for fmt, artifact in artifacts.items()}
    print(found)
    # The recorded value is transformers' own of the BF16 weights, computed in float32.
    assert found["bf16"] == pytest.approx(FACTS["bf16_perplexity"], rel=1e-4)
    assert found["fp8"] == pytest.approx(found["bf16"], rel=0.01)
    assert found["fp8"] < found["nvfp4"] < found["mxfp4"] < 1.1 * found["bf16"]


def test_the_checkpoint_is_an_ordinary_folder_of_8_mb():
    files = list((DEMO / "model").iterdir())
    assert sum(f.stat().st_size for f in files) <= 8_000_000
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".jinja"}


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def hub(monkeypatch):
    """The demo checkpoint under the name that the README uses."""
    commit = "c" * 40
    with HubServer({"Qwen/Qwen3-30B-A3B": {commit: DEMO / "model"}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_every_command_of_the_readme(hub, tmp_path, monkeypatch):
    """In order, in an empty folder. `make` and `pip install` are what runs this test."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    commands = [line for block in readme_blocks("sh") for line in block.splitlines()]
    assert {"make demo", "make test", "pip install ."} <= set(commands)
    run = [c for c in commands if c.startswith("tutel-")]
    assert len(run) + 3 == len(commands) and len(run) >= 8
    for command in run:
        words = shlex.split(command)
        if words[1] in ("generate", "chat"):
            words += ["--max-tokens", "8"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, input="Hello\n")
        assert done.returncode == 0 and "Traceback" not in done.stderr, (command, done.stderr)
        assert done.stdout.strip()
    (python,) = readme_blocks("python")
    done = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_make_demo_ends_with_text(artifacts):
    """The Makefile's own generate command, on the artifact that its convert command makes."""
    (line,) = re.findall(r"^\t@\$\(BIN\)/(tutel-run generate .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = [str(artifacts["nvfp4"]) if w == "demo/out/nvfp4" else w for w in shlex.split(line)]
    done = subprocess.run([Path(sys.executable).with_name(words[0]), *words[1:]], capture_output=True, text=True, check=True)
    vocabulary = set(re.findall(r"[a-z]+", (DEMO / "heldout.txt").read_text().lower()))
    written = re.findall(r"[a-z]+", done.stdout.lower())
    # Recognisable English: nearly every word is one that the held-out text has.
    assert len(written) >= 30
    assert sum(word in vocabulary for word in written) / len(written) > 0.8
