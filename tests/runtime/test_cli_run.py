"""`tutel-run` with a fake model behind a real artifact: what it prints where, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import tutel_pack
from click.testing import CliRunner
from tests.runtime.fake_model import (
    FakeDecoder,
    FakeModel,
    byte_tokenizer,
    fake_load_packed,
    says,
    write_artifact,
    write_json,
)

from tutel_pack import recent
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.runtime.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TUTEL_MODEL", raising=False)
    monkeypatch.setitem(vars(tutel_pack), "load_packed", fake_load_packed)


@pytest.fixture
def artifact(tmp_path) -> str:
    return str(write_artifact(tmp_path / "model"))


def tutel_run(*args: str, code=0, **options):
    result = CliRunner().invoke(main, args, **options)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def loads(monkeypatch, model_or_error):
    """Make load_packed give a model, or raise."""

    def load(path, **options):
        if isinstance(model_or_error, Exception):
            raise model_or_error
        return model_or_error

    monkeypatch.setitem(vars(tutel_pack), "load_packed", load)


def plain_model(tmp_path, answer: bytes, prompt: int) -> FakeModel:
    """One without a chat template."""
    return FakeModel(tmp_path, FakeDecoder(next_token=says(answer, prompt)), byte_tokenizer())


def test_the_answer_goes_to_standard_output_and_statistics_to_standard_error(artifact):
    result = tutel_run("generate", artifact, "Hi")
    assert result.stdout == "1 turns 🦙\n"
    assert (
        result.stderr.startswith("Prompt ")
        and result.stderr.endswith(", complete.\n")
        and result.stderr.count("\n") == 1
    )


def test_native_kernels_that_cannot_be_had_are_said(artifact, monkeypatch):
    monkeypatch.setattr("tutel_pack.kernels.cpu.native.missing", lambda: "the library was not built")
    note = "Note: torch's slower operations are used, for native kernels cannot be had: the library was not built."
    assert note in tutel_run("generate", artifact, "Hi").stderr
    assert note not in tutel_run("generate", artifact, "Hi", "--quiet").stderr
    assert note not in tutel_run("generate", artifact, "Hi", "--backend", "torch").stderr


def test_quiet_prints_the_answer_only(artifact):
    result = tutel_run("generate", artifact, "Hi", "--quiet")
    assert (result.stdout, result.stderr) == ("1 turns 🦙\n", "")


def test_json_is_one_object_of_stable_names(artifact):
    result = tutel_run("generate", artifact, "Hi", "--json")
    data = json.loads(result.stdout)
    assert (data["model"], data["text"], data["finish_reason"], data["generated_tokens"]) == (
        artifact,
        "1 turns 🦙",
        "stop",
        13,
    )
    assert data["prompt_tokens"] == len("[turn]user: Hi\n[turn]assistant: ")
    assert data["prompt_seconds"] >= 0 and data["generation_seconds"] >= 0
    assert result.stderr == ""


def test_raw_continues_the_prompt_without_the_template(artifact):
    assert tutel_run("generate", artifact, "Hi", "--raw").stdout == "0 turns 🦙\n"


def test_a_model_without_a_template_continues_the_prompt(tmp_path, monkeypatch):
    loads(monkeypatch, plain_model(tmp_path, b", world\n", 5))
    assert tutel_run("generate", "x", "Hello").stdout == ", world\n", "and no second line end"


def test_a_dash_reads_standard_input_without_its_last_line_end(tmp_path, monkeypatch):
    loads(monkeypatch, plain_model(tmp_path, b"!", 5))
    assert tutel_run("generate", "x", "-", input="a\n\n🦙"[:3] + "bc\n").stdout == "!\n"


def test_standard_input_that_is_no_text_is_refused(artifact):
    assert "not UTF-8" in tutel_run("generate", artifact, "-", input=b"a\xff", code=2).stderr


def test_sampling_options_reach_the_model(tmp_path, monkeypatch):
    model = plain_model(tmp_path, b"one END", 1)
    loads(monkeypatch, model)
    assert tutel_run("generate", "x", "a", "-n", "2").stderr.endswith("cut off at the token limit.\n")
    assert tutel_run("generate", "x", "a", "--max-tokens", "2").stdout == "on\n"
    assert tutel_run("generate", "x", "a", "--stop", "zzz", "--stop", "END").stdout == "one \n"
    every = "--temp 1 --temperature 0.7 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 5".split()
    assert tutel_run("generate", "x", "a", *every).stdout == "one END\n"


@pytest.mark.parametrize(
    "option, value", [("--top-p", "2"), ("--temperature", "-1"), ("-n", "0"), ("--stop", ""), ("--seed", "-3")]
)
def test_a_wrong_option_fails_before_the_model_is_loaded(monkeypatch, option, value):
    loads(monkeypatch, AssertionError("loaded"))
    assert " must be " in tutel_run("generate", "x", "a", option, value, code=2).stderr


def test_the_checkpoints_own_sampling_is_the_default(artifact):
    write_json(Path(artifact), generation_config={"max_new_tokens": 3})
    assert tutel_run("generate", artifact, "Hi").stdout == "1 t\n"
    assert tutel_run("generate", artifact, "Hi", "-n", "4").stdout == "1 tu\n"


def test_load_options_reach_the_loader(monkeypatch):
    import torch

    def load(path, **options):
        raise InputError(f"{path} {options}")

    monkeypatch.setitem(vars(tutel_pack), "load_packed", load)
    words = "generate x a --device cuda:1 --dtype float32 --backend torch --act fp8 --threads 3 --mlock --prefault"
    words, where = words.split(), dict(dtype=torch.float32, device="cuda:1", backend="torch", act="fp8")
    options = dict(**where, threads=3, mlock=True, prefault=True)
    assert tutel_run(*words, code=2).stderr == f"Error: x {options}\n"
    assert "--threads" in tutel_run("generate", "x", "a", "--threads", "0", code=2).stderr
    assert "'dtype': None" in tutel_run("generate", "x", "a", code=2).stderr


def test_all_formats_of_activations_can_be_asked_for():
    """The command has their names itself, so that --help need not load torch."""
    from tutel_pack.kernels.ops import ACTS, CPU_ACTS
    from tutel_pack.runtime import cli

    assert set(cli.ACTS) == {*ACTS, *CPU_ACTS}


def test_without_an_artifact_the_latest_conversion_is_taken_and_named(artifact, monkeypatch, tmp_path):
    assert "No model is named" in tutel_run("generate", "Hi", code=2).stderr
    recent.remember(artifact)
    result = tutel_run("generate", "Hi")
    assert result.stdout == "1 turns 🦙\n"
    assert result.stderr.startswith(f"Model: {artifact} (the latest conversion)\n")
    assert tutel_run("generate", "Hi", "-q").stderr == ""
    other = str(write_artifact(tmp_path / "other"))
    monkeypatch.setenv("TUTEL_MODEL", other)
    assert tutel_run("generate", "Hi").stderr.startswith(f"Model: {other} ($TUTEL_MODEL)\n")
    assert "Model:" not in tutel_run("generate", artifact, "Hi").stderr


def test_a_latest_conversion_that_is_gone_is_named(tmp_path):
    recent.remember(tmp_path / "gone")
    stderr = tutel_run("generate", "Hi", code=2).stderr
    assert stderr == f"Error: {tmp_path / 'gone'} (the latest conversion) does not exist: name an artifact's folder.\n"


def test_the_latest_conversion_is_kept_as_an_absolute_path(tmp_path, monkeypatch):
    assert recent.recall() is None
    monkeypatch.chdir(tmp_path)
    recent.remember("here é")
    assert recent.recall() == tmp_path / "here é"
    assert [f.name for f in (tmp_path / "state" / "tutel-pack").iterdir()] == ["latest"]


def test_a_home_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    recent.remember(tmp_path)
    assert recent.recall() is None


def test_a_relative_state_folder_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recent.remember(tmp_path)
    assert (tmp_path / "home/.local/state/tutel-pack/latest").exists()


@pytest.mark.parametrize(
    "args, message",
    [
        (["generate", "a", "b", "c"], "put the prompt in quotes"),
        (["generate"], "Missing argument '[ARTIFACT] PROMPT'"),
        (["generat", "a"], "Did you mean 'generate'?"),
        (["generate", "a", "b", "--raw", "--system", "x"], "give only one of them"),
        (["generate", "Qwen/Qwen3-30B-A3B", "Hi"], "`tutel-convert Qwen/Qwen3-30B-A3B`"),
        (["generate", "./nowhere", "Hi"], "No packed artifact at nowhere"),
        (["chat", "./nowhere"], "No packed artifact at nowhere"),
    ],
    ids=" ".join,
)
def test_mistakes_get_a_sentence_and_exit_code_2(args, message):
    assert message in tutel_run(*args, code=2).stderr


def test_an_unconverted_checkpoint_says_how_to_convert_it(tmp_path):
    write_json(tmp_path, config={})
    assert f"`tutel-convert {tmp_path}`" in tutel_run("generate", str(tmp_path), "Hi", code=2).stderr


def test_an_artifact_without_a_prompt_is_not_taken_for_the_prompt(artifact):
    assert "the prompt is missing" in tutel_run("generate", artifact, code=2).stderr


def test_a_system_prompt_needs_a_template(tmp_path, monkeypatch):
    loads(monkeypatch, plain_model(tmp_path, b"", 1))
    assert "no chat template" in tutel_run("generate", "x", "a", "--system", "Be kind", code=2).stderr


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ResourceError("It does not fit."), 3, "Error: It does not fit.\n"),
        (MemoryError(), 3, "Error: Out of memory: MemoryError\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            3,
            "Error: Out of memory: [enforce",
        ),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_failures_of_the_machine_have_their_exit_codes(monkeypatch, error, code, message):
    def load(path, **options):
        raise error

    monkeypatch.setitem(vars(tutel_pack), "load_packed", load)
    assert tutel_run("generate", "x", "a", code=code).stderr.startswith(message)


def test_errors_of_the_program_itself_are_not_hidden(monkeypatch):
    loads(monkeypatch, RuntimeError("a bug"))
    assert isinstance(CliRunner().invoke(main, ["generate", "x", "a"]).exception, RuntimeError)


def test_chat_keeps_the_conversation_until_it_is_reset(artifact):
    lines = "Hi\n\nmore\n/no_think more\n/reset\nHi\n/system Be kind\nHi\nmore\n/exit\nnever\n"
    result = tutel_run("chat", artifact, input=lines)
    assert result.stdout == "".join(f"{n} turns 🦙\n" for n in (1, 2, 3, 1, 1, 2))
    assert result.stderr == ""


def test_chat_sends_the_system_prompt_and_its_own_answers_back(tmp_path, monkeypatch):
    model = fake_load_packed(write_artifact(tmp_path))
    loads(monkeypatch, model)
    seen, forward = [], model.decoder.forward

    def spy(batch, cache):
        seen.append(bytes(t for t in batch.tokens.tolist() if t < 256))
        return forward(batch, cache)

    model.decoder.forward = spy
    tutel_run("chat", "x", "--system", "Be kind", input="Hi\nmore\n")
    expected = "[turn]system: Be kind\n[turn]user: Hi\n[turn]assistant: 1 turns 🦙\n[turn]user: more\n[turn]assistant: "
    assert [t.decode() for t in seen if len(t) > 1][-1] == expected


def test_chat_says_when_an_answer_is_cut_off(artifact):
    result = tutel_run("chat", artifact, "-n", "3", input="Hi\n")
    assert (result.stdout, result.stderr) == ("1 t\n", "[cut off at the token limit]\n")


def test_chat_without_a_template_fails_at_once(tmp_path, monkeypatch):
    loads(monkeypatch, plain_model(tmp_path, b"", 1))
    assert "no chat template" in tutel_run("chat", "x", input="", code=2).stderr


def test_chat_from_a_pipe_ends_at_an_error(artifact):
    result = tutel_run("chat", artifact, input="Hi\n" + "long " * 200 + "\nHi\n", code=2)
    assert result.stdout == "1 turns 🦙\n" and "context is 512" in result.stderr


SCRIPT = """
import time, tutel_pack
from tests.runtime import fake_model
def load(path, **options):
    model = fake_model.fake_load_packed(path, **options)
    model.decoder._next_token = next_token
    return model
def next_token(past):
    time.sleep(0.02)
    last = bytes(t for t in past if t < 256).split(b"[turn]user: ")[-1]
    return ord("A") if b"forever" in last else fake_model.answers_turns(past)
tutel_pack.load_packed = load
from tutel_pack.runtime.cli import main
main(prog_name="tutel-run")
"""


def process(*args: str, **options) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *args], env=env, text=True, **{**pipes, **options})


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, *args: str):
        self._fd, theirs = pty.openpty()
        own = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = process(
            *args, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **own
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, again: str = "") -> None:
        """Until that is shown. `again` is typed every second meanwhile: a signal that arrives between the prompt and
        readline's wait for a key is seen at the next key only."""
        shown, end = b"", time.monotonic() + 60
        while text.encode() not in shown:
            assert time.monotonic() < end, shown
            if select.select([self._fd], [], [], 1)[0]:
                shown += os.read(self._fd, 1000)
            elif again:
                self.type(again)


def test_a_mistake_in_a_real_process_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "tutel_pack.runtime.cli", "generate", "Hi"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: No model is named") and done.stderr.count("\n") == 1


def test_real_processes_stream_and_stop_as_promised(artifact):
    """Started together, since most of their time is importing torch."""
    interrupted, piped = (process("generate", artifact, "forever") for _ in range(2))
    chat = Terminal("chat", artifact)

    assert interrupted.stdout.read(3) == "AAA", "the text is streamed"
    interrupted.send_signal(signal.SIGINT)
    piped.stdout.read(3)
    piped.stdout.close()

    assert interrupted.wait(timeout=60) == 130
    assert interrupted.stderr.read() == "\nInterrupted.\n"
    assert piped.wait(timeout=60) == 0
    assert piped.stderr.read() == ""
    check_chat(chat)


def check_chat(chat: Terminal) -> None:
    """Ctrl-C stops an answer, and at the prompt nothing; an error is survived; Ctrl-D leaves."""
    chat.wait_for("> ")
    chat.type("Hi\n")
    chat.wait_for("1 turns 🦙\r\n> ")
    chat.type("forever\n")
    chat.wait_for("AAA")
    chat.type("\x03")
    chat.wait_for(" [stopped]\r\n> ")
    chat.type("\x03")
    chat.wait_for("Ctrl-D or /exit leaves.\r\n> ", again="\x03")
    chat.type("long " * 100 + "\n")
    chat.wait_for("context is 512")
    chat.type("more\n")
    chat.wait_for("3 turns 🦙\r\n> ")
    chat.type("\x04")
    assert chat.process.wait(timeout=60) == 0


def test_help_answers_at_once():
    """It imports neither torch nor transformers, which alone take seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "tutel_pack.runtime.cli", "--help"]
    out = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.STDOUT)
    assert "generate" in out and " torch" not in out and " transformers" not in out


def test_help_fits_a_terminal_of_80_columns():
    for args in ([], ["generate"], ["chat"]):
        text = tutel_run(*args, "--help", terminal_width=80).output
        assert max(map(len, text.splitlines())) <= 80
    assert tutel_run("--version").output == f"tutel-run {tutel_pack.__version__}\n"


def test_a_full_context_is_said_to_be_full(tmp_path, monkeypatch):
    loads(monkeypatch, plain_model(tmp_path, b"A" * 600, 2))
    assert "cut off: the context of 512 is full" in tutel_run("generate", "x", "Hi").stderr


@pytest.mark.parametrize("options, words", [(("-n", "0"), "--max-tokens must be"), (("--top-p", "2"), "--top-p must be")])
def test_wrong_options_are_named_as_typed(artifact, options, words):
    assert words in tutel_run("generate", artifact, "Hi", *options, code=2).stderr


def test_an_empty_prompt(artifact):
    assert "The prompt is empty" in tutel_run("generate", artifact, " ", code=2).stderr


def test_full_standard_output_is_one_line_and_exit_code_3(artifact):
    with open("/dev/full", "w") as full:
        done = process("generate", artifact, "Hi", stdout=full)
        assert done.wait(timeout=60) == 3
    said = done.stderr.read()
    assert "no space left" in said and "Traceback" not in said


def test_doctor_names_versions_kernels_and_the_path(artifact):
    shown = tutel_run("doctor", artifact).stdout
    assert all(word in shown for word in ("torch ", "kernels", "cores", "path", "native"))
    found = json.loads(tutel_run("doctor", "--json").stdout)
    assert "path" not in found and found["tutel-pack"] == tutel_pack.__version__
    assert "not a packed artifact" in tutel_run("doctor", str(ROOT / "demo"), code=2).stderr


def test_doctor_names_the_instruction_set_or_why_there_is_none(monkeypatch):
    from tutel_pack.kernels.cpu import native

    monkeypatch.setattr(native, "missing", lambda: "")
    monkeypatch.setattr(native, "available", lambda: ["avx512", "avx2", "portable"])
    monkeypatch.setattr(native, "selected", lambda: "avx2")
    monkeypatch.setattr(native, "threads", lambda: 6)
    assert "cpu (avx2; there are avx512, portable too; 6 threads), triton (for GPUs), torch" in tutel_run("doctor").stdout

    monkeypatch.setattr(native, "missing", lambda: "it was not built: install a compiler")
    assert "torch (no native ones: it was not built: install a compiler)" in tutel_run("doctor").stdout
