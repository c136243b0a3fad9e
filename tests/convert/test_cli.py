"""The command tutel-convert, each time as a process: what it prints where, and how it ends."""

import json
import os
import resource
import subprocess
import sys

import pytest
import torch

from tests.checkpoints import ROOT, finish, forked, fp8_config, qwen3_config, qwen3_weights, tree, tutel_convert, write_checkpoint
from tutel_pack.artifact import MANIFEST, Artifact
from tutel_pack.convert.cli import size
from tutel_pack.convert.pipeline import convert_checkpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the checkpoint `model` and its artifact `packed`, which no test may change."""
    folder, config = tmp_path_factory.mktemp("home"), qwen3_config(num_hidden_layers=2)
    write_checkpoint(folder / "model", qwen3_weights(config), config)
    convert_checkpoint(str(folder / "model"), folder / "packed")
    return folder


@pytest.fixture
def run(home, tmp_path):
    """Runs the command in an empty directory, from which the checkpoint and the artifact can be seen."""
    for name in ("model", "packed"):
        (tmp_path / name).symlink_to(home / name)
    return lambda *args, **options: forked(tmp_path, *args, **options)


def refused(result, *parts) -> None:
    """A user's mistake: exit code 2, one sentence (after click's usage where the arguments are wrong), no traceback."""
    code, out, err = result
    lines = err.splitlines()
    assert (code, out) == (2, ""), err
    assert lines[-1].startswith("Error: ") and "Traceback" not in err and (len(lines) == 1 or lines[0].startswith("Usage: "))
    assert [part for part in parts if part not in lines[-1]] == [], err


# Help


def test_help_is_quick_and_imports_nothing_heavy():
    code = "import sys, tutel_pack.convert.cli; sys.exit(bool({'torch', 'numpy', 'huggingface_hub', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, out, err = finish(tutel_convert("--help"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # not the clock's: others use the machine too
    assert (code, err) == (0, "") and out.startswith("Usage: tutel-convert [OPTIONS] MODEL")
    for word in ("--fmt", "--rest", "--override", "--scales", "--dry-run", "--force", "--quiet", "--json", "--revision", "inspect", "verify", "Exit codes"):
        assert word in out
    assert "  pack" not in out


def test_other_ways_to_ask(run):
    assert run("-h")[1] == run("--help")[1] and run("--version")[1].startswith("tutel-convert ")
    assert run("verify", "--help")[1].startswith("Usage: tutel-convert verify")
    assert "MODEL" in run()[1] + run()[2]


# Conversions


def test_progress_lines_and_the_result(run, tmp_path):
    code, out, err = run("model", "--fmt", "fp8", "-o", "out")
    assert code == 0 and [line.split(":")[0] for line in err.splitlines()] == [
        "layers-00000.safetensors", "layers-00001.safetensors", "base.safetensors"]  # fmt: skip
    assert err.splitlines()[-1].endswith("MB read") and "%" in err and "\r" not in err
    assert out.startswith("out: ") and "Relative error of what was quantized: fp8 2." in out and len(out.splitlines()) == 2
    assert (tmp_path / "tutel-pack" / "latest").read_text() == str(tmp_path / "out")


def test_a_bar_on_a_terminal(run):
    code, out, err = run("model", "-o", "out", before="import sys; sys.stderr.isatty = lambda: True")
    assert code == 0 and "\r" in err and "100%" in err and "base" in err


def test_quiet_prints_nothing(run, tmp_path):
    assert run("model", "-q", "-o", "out") == (0, "", "") and Artifact(tmp_path / "out").verify() == []
    refused(run("model", "--quiet", "-o", "out"), "out exists")


def test_json_is_one_object(run, tmp_path):
    code, out, err = run("model", "--json", "--fmt", "nvfp4")
    facts = json.loads(out)
    artifact = Artifact(tmp_path / "model-nvfp4")  # the default name
    assert code == 0 and facts["output"] == "model-nvfp4" and facts["layers"] == 2
    assert facts["bytes_written"] == artifact.nbytes and set(facts["errors"]) == {"fp8", "nvfp4"}
    assert facts["bytes_read"] == sum(w.nbytes for w in qwen3_weights(qwen3_config(num_hidden_layers=2)).values())
    assert facts["formats"]["nvfp4"]["tensors"] == 2 and facts["seconds"] > 0


def test_options_stand_anywhere(run, tmp_path):
    outs = [("--fmt", "fp8", "-o", "a", "model"), ("model", "-o", "b", "--fmt=fp8"), ("-o", "c", "model", "--fmt", "fp8"), ("pack", "model", "--fmt", "fp8", "-o", "d")]
    assert [run("-q", *args)[0] if args[0] != "pack" else run(*args)[0] for args in outs] == [0] * 4
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c") == tree(tmp_path / "d")


def test_dry_run(run, tmp_path):
    before = sorted(os.listdir(tmp_path))
    code, out, err = run("model", "--dry-run")
    assert (code, err) == (0, "") and sorted(os.listdir(tmp_path)) == before
    assert out.splitlines()[0] == "model, 2 layers -> model-mxfp4"
    for word in ("read", "write", "mxfp4", "fp8", "plain", "2 tensors"):
        assert word in out
    code, text, err = run("model", "--dry-run", "--json")
    facts = json.loads(text)
    assert (code, err) == (0, "") and facts["bytes_written"] == Artifact(tmp_path / "packed").nbytes
    assert sum(f["bytes"] for f in facts["formats"].values()) <= facts["bytes_written"] and "seconds" not in facts
    assert run("model", "--dry-run", "-o", "packed")[0] == 0  # it will not be written


def test_overrides_on_the_command_line(run, tmp_path):
    args = ("--override", "lm_head=bf16", "--override", r"layers\.1\.=nvfp4", "--rest", "mxfp4", "--scales", "floor")
    code, out, err = run("model", "-q", "-o", "out", *args)
    tensors = Artifact(tmp_path / "out").manifest.tensors
    assert code == 0 and tensors["lm_head.weight"].format.name == "bf16"
    assert tensors["model.layers.1.mlp.up_proj.weight"].format.name == "nvfp4"
    assert tensors["model.layers.0.self_attn.q_proj.weight"].format.name == "mxfp4"


def test_an_equals_sign_may_be_in_the_pattern(run):
    refused(run("model", "--override", "a=b=fp8"), "'a=b' matches no tensor")


# Sub-commands and paths


def test_a_near_miss_gets_a_suggestion(run, tmp_path):
    refused(run("inspct", "packed"), "Did you mean 'inspect'?", "./inspct")
    refused(run("verfy"), "Did you mean 'verify'?")
    write_checkpoint(tmp_path / "verfy", qwen3_weights(qwen3_config()), qwen3_config())
    assert run("verfy", "--dry-run")[0] == 0  # a folder of that name is what is meant
    refused(run("./inspect"), "no such folder")
    write_checkpoint(tmp_path / "inspect", qwen3_weights(qwen3_config()), qwen3_config())
    assert run("./inspect", "--dry-run")[1].startswith("inspect, 3 layers")
    refused(run("inspect"), "Missing argument 'ARTIFACT'")


def test_inspect(run, home):
    code, out, err = run("inspect", "packed")
    assert (code, err) == (0, "") and out.startswith("packed: qwen3_moe, 2 layers") and "12×192×160" in out and "%" in out
    assert len(out.splitlines()) == 2 + len(Artifact(home / "packed").manifest.tensors)
    code, out, err = run("inspect", "packed", "--json")
    assert json.loads(out) == json.loads((home / "packed" / MANIFEST).read_text())


def test_verify(run, home, tmp_path):
    code, out, err = run("verify", "packed")
    assert (code, err) == (0, "") and "all as they were written" in out
    convert_checkpoint(str(home / "model"), tmp_path / "bad")
    with open(tmp_path / "bad" / "base.safetensors", "r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(bytes([last[0] ^ 1]))
    refused(run("verify", "bad"), "base.safetensors", "copy or convert it again")
    code, out, err = run("verify", "bad", "--json")
    assert code == 2 and json.loads(out)["damaged"] == ["base.safetensors"]


# Mistakes


@pytest.mark.parametrize("args, parts", [
    (("nowhere",), ["'nowhere' is neither an existing folder nor a Hub id"]), (("./nowhere",), ["no such folder"]), (("",), ["neither"]),
    (("model", "--fmt", "int4"), ["Unknown format 'int4'", "mxfp4"]), (("model", "--rest", "x"), ["'x'"]), (("model", "--scales", "x"), ["'x'"]),
    (("model", "--override", "x"), ["REGEX=FMT"]), (("model", "--override", "=fp8"), ["REGEX=FMT"]), (("model", "--override", "x="), ["''"]),
    (("model", "--override", "[=fp8"), ["not a regular expression"]), (("model", "--override", "zzz=fp8"), ["matches no tensor"]),
    (("model", "--revision", "main"), ["is a folder and has no revision"]), (("model", "--nonsense"), ["No such option"]),
    (("model", "model"), ["unexpected extra argument"]), (("model", "-o", "packed"), ["packed exists", "--force"]),
    (("model", "-o", "model", "--force"), ["model exists and is not an artifact"]), (("packed",), ["packed artifact already"]),
    (("model", "-o", "model/config.json/x"), ["cannot be written"]), (("model/config.json",), ["is a file"]), (("n" * 300,), ["nnn"]),
    (("/",), ["/ has no config.json"]), (("packed/..",), ["has no config.json"]), (("a\nb",), ["a\\nb"]), (("inspect", "model"), ["is a checkpoint, not a packed artifact"]),
    (("inspect", "nowhere"), ["No packed artifact at nowhere"]), (("verify", "n" * 300), ["nnn"]), (("verify", "/dev/null"), ["/dev/null"]),
    (("model", "-o", "n" * 300), ["cannot be written"]),
])  # fmt: skip
def test_mistakes(run, args, parts):
    refused(run(*args), *parts)


@pytest.mark.parametrize("config", ["[]", "{", '{"model_type": ["qwen3_moe"]}', json.dumps(qwen3_config(num_hidden_layers=10**12)),
                                    json.dumps(fp8_config() | {"quantization_config": {"quant_method": "awq"}}),
                                    json.dumps(qwen3_config(hidden_act="\x1b[31m\ud800\n"))])  # fmt: skip
def test_broken_checkpoints(run, tmp_path, config):
    write_checkpoint(tmp_path / "broken", qwen3_weights(qwen3_config()), config)
    refused(run("broken"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("broken-")]


def test_weights_that_are_no_numbers(run, tmp_path):
    weights = qwen3_weights(qwen3_config())
    weights["lm_head.weight"][3, 4] = torch.nan
    write_checkpoint(tmp_path / "bad", weights, qwen3_config())
    code, out, err = run("bad", "-q")
    assert (code, out) == (2, "") and err.startswith("Error: lm_head.weight has a weight that is NaN or infinite at [3, 4]")
    assert len(err.splitlines()) == 1 and not (tmp_path / "bad-mxfp4").exists() and not (tmp_path / "bad-mxfp4.partial").exists()


def test_names_that_are_not_utf8(run, home, tmp_path):
    folder = os.fsdecode(b"caf\xe9")
    os.symlink(home / "model", tmp_path / folder)
    code, out, err = run(folder)
    assert code == 0 and "Traceback" not in err
    assert Artifact(tmp_path / f"{folder}-mxfp4").verify() == []
    assert run("inspect", f"{folder}-mxfp4")[0] == 0


def test_out_of_memory(run):
    before = "import tutel_pack.convert.pipeline as p\ndef plan(*_): raise MemoryError\np.plan = plan"
    code, out, err = run("model", before=before)
    assert (code, out, err) == (3, "", "Error: Out of memory: MemoryError\n")


# Pipes that nobody reads

CLOSED = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, {0})
sys.{1} = open({0}, "w", closefd=False)
"""


def test_nobody_reads_the_output(run, tmp_path):
    for args in (("inspect", "packed"), ("verify", "packed"), ("model", "--dry-run"), ("model", "-o", "a")):
        code, out, err = run(*args, before=CLOSED.format(1, "stdout"))
        assert code == 0 and "Traceback" not in err and "Exception ignored" not in err
    assert Artifact(tmp_path / "a").verify() == []


def test_nobody_reads_the_progress(run, tmp_path):
    code, out, err = run("model", "-o", "out", before=CLOSED.format(2, "stderr"))
    assert code == 0 and out.startswith("out: ") and Artifact(tmp_path / "out").verify() == []


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2.5e9, "2.50 GB"), (1.5e12, "1.50 TB"), (1e16, "10000.00 TB")])
def test_sizes(count, text):
    assert size(count) == text
