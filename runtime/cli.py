"""The command `tutel-run`. torch is imported only when a model is loaded, so that --help answers at once."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from tutel_pack import __version__, recent
from tutel_pack.commands import CONTEXT, Commands
from tutel_pack.errors import InputError

OPTIONS = {
    "max_new_tokens": "--max-tokens", "temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty", "seed": "--seed", "stop": "--stop",
}  # fmt: skip
"""SamplingParams' fields by the options that set them."""
DTYPES = ("bfloat16", "float16", "float32")
ACTS = ("mxfp8", "nvfp4", "fp8", "int8")
EPILOG = """
\b
Exit codes: 0 done, 2 bad input, 3 memory or device lacking, 130 interrupted.
Completion in bash: eval "$(_TUTEL_RUN_COMPLETE=bash_source tutel-run)"
(zsh_source and fish_source likewise).
"""


@click.group(cls=Commands, epilog=EPILOG, context_settings=CONTEXT)
@click.version_option(__version__, "--version", message="tutel-run %(version)s")
def main():
    """Run packed Mixture-of-Experts models.

    ARTIFACT is a folder that tutel-convert wrote. Left out, it is $TUTEL_MODEL, or else the latest conversion.
    """


def _options(*options: Callable) -> Callable:
    """Several decorators as one, in the order of --help."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


sampling_options = _options(
    click.option(
        "-n", "--max-tokens", "max_new_tokens", type=int, metavar="N", help="Tokens at most.  [until the model ends]"
    ),
    click.option(
        "--temperature", "--temp", type=float, metavar="X", help="0 takes the likeliest.  [the model's, or 0]"
    ),
    click.option("--top-k", type=int, metavar="K", help="From the K likeliest tokens; 0 is all."),
    click.option("--top-p", type=float, metavar="P", help="From the likeliest that add up to P."),
    click.option("--min-p", type=float, metavar="P", help="From those at least P times the likeliest."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Above 1 avoids tokens seen before."),
    click.option("--seed", type=int, metavar="N", help="Makes sampling repeatable."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
)
model_options = _options(
    click.option("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, …  [a GPU if there is one]"),
    click.option("--dtype", type=click.Choice(DTYPES), metavar="TYPE", help=f"{', '.join(DTYPES)}.  [{DTYPES[0]}]"),
    click.option("--backend", default="auto", metavar="NAME", help="Kernels to run with.  [auto]"),
    click.option(
        "--act", type=click.Choice(ACTS), metavar="FMT", help=f"Quantize experts' activations: {', '.join(ACTS)}.  [no]"
    ),
    click.option(
        "--threads", type=click.IntRange(min=1), metavar="N", help="Of the CPU.  [OMP_NUM_THREADS, or all it may run on]"
    ),
    click.option("--prefault", is_flag=True, help="Read all weights now, not on first use (CPU)."),
    click.option("--mlock", is_flag=True, help="And keep them in memory (CPU)."),
)
system_option = click.option("--system", metavar="TEXT", help="A system prompt.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Only errors on standard error.")


@main.command()
@click.argument("words", nargs=-1, required=True, metavar="[ARTIFACT] PROMPT")
@sampling_options
@system_option
@click.option("--raw", is_flag=True, help="No chat template: continue PROMPT as it is.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")
@quiet_option
def generate(words, system, raw, as_json, quiet, **options):
    """Answer or continue PROMPT; `-` reads it from standard input.

    A model with a chat template gets PROMPT as a user's message, any other continues it. The text goes to standard
    output while it is generated, statistics to standard error.

    \b
    Examples:
      tutel-run generate ./DeepSeek-V3-mxfp4 "Why is the sky blue?"
      git diff | tutel-run generate --system "Review this." -n 500 -
    """
    if raw and system:
        raise click.UsageError("--system is for the chat template that --raw leaves out: give only one of them.")
    artifact, prompt = _artifact_and_prompt(words)
    model, sampling = _load(artifact, quiet, options)
    events = _events(model, prompt, raw, system, sampling)
    if as_json:
        *_, last = events
        found = {"model": str(model.artifact.path), "act": options["act"], **_facts(last.result)}
        return click.echo(json.dumps(found, ensure_ascii=False))
    result = _show(events)
    if not result.text.endswith("\n"):
        click.echo()
    if not quiet:
        click.echo(_statistics(result, model.spec.context), err=True)


@main.command()
@click.argument("artifact", required=False, metavar="[ARTIFACT]")
@sampling_options
@system_option
@model_options
@quiet_option
def chat(artifact, system, quiet, **options):
    """Talk with a model, a line at a time.

    Ctrl-C stops an answer, Ctrl-D leaves. Lines may come from a pipe as well.

    \b
    /reset        forget the conversation
    /system TEXT  set the system prompt and forget the conversation
    /exit         leave
    """
    from tutel_pack.runtime.chat import require_template

    model, sampling = _load(artifact, quiet, options)
    require_template(model.tokenizer)
    terminal = sys.stdin.isatty()
    if terminal and not quiet:
        click.echo("Ctrl-C stops an answer, Ctrl-D leaves; /reset, /system TEXT, /exit.", err=True)
    history: list[dict] = []
    for line in _lines(terminal):
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            break
        if command in ("/reset", "/system"):
            system = (rest.strip() or None) if command == "/system" else system
            history = []
        elif line.strip():  # models have commands of their own, such as /no_think: those are messages
            history = _answer(model, [*history, {"role": "user", "content": line}], system, sampling, terminal, quiet)


@main.command()
@click.argument("artifact", required=False, metavar="[ARTIFACT]", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(artifact, as_json):
    """Say what this machine has, and which path an artifact takes on it."""
    from tutel_pack.runtime.doctor import facts

    found = facts(artifact)
    if as_json:
        return click.echo(json.dumps(found))
    width = max(map(len, found))
    for name, value in found.items():
        click.echo(f"{name:<{width}}  {', '.join(value) if isinstance(value, list) else value}")


@main.command()
@click.argument("artifact", required=False, metavar="[ARTIFACT]")
@click.option("--model", metavar="NAME", help="A well-known model instead, such as DeepSeek-V3.")
@click.option("--fmt", metavar="FMT", help="Format of its experts: fp8, mxfp4, nvfp4 or bf16.  [mxfp4]")
@click.option("--chip", "chips", multiple=True, metavar="NAME", help="h200, mi300x, … (repeatable).  [all there are]")
@click.option("--gpus", type=click.IntRange(1), default=1, metavar="N", help="How many of them.  [1]")
@click.option("--batch", type=click.IntRange(1), default=1, metavar="B", help="Sequences at once.  [1]")
@click.option("--context", type=click.IntRange(1), metavar="L", help="Positions each has in the cache.  [4096]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(artifact, model, fmt, chips, gpus, batch, context, as_json):
    """Say how fast a model can decode on a GPU at most, what limits it, and whether it fits.

    \b
    Example:
      tutel-run plan --model DeepSeek-V3 --fmt nvfp4 --chip h200 --gpus 8 --batch 64
    """
    if artifact and model:
        raise click.UsageError("An artifact and --model are two models: give only one of them.")
    if fmt and not model:
        raise click.UsageError("--fmt is for --model: an artifact has its formats.")
    from tutel_pack.kernels.triton.gpus import GPUS
    from tutel_pack.runtime import planning

    wanted = model or _folder(artifact, quiet=False)
    found = planning.estimates(wanted, fmt or "mxfp4", chips or tuple(GPUS), gpus, batch, context)
    if as_json:
        return click.echo(json.dumps({"model": str(wanted), "chips": [e.to_json() for e in found]}))
    click.echo(planning.HEAD)
    for e in found:
        click.echo(planning.line(e))
    click.echo(planning.caveats(found))


def _artifact_and_prompt(words: tuple[str, ...]) -> tuple[str | None, str]:
    if len(words) > 2:
        raise click.UsageError(f"Expected an artifact and a prompt, got {len(words)} words: put the prompt in quotes.")
    if len(words) == 1 and Path(words[0], "packed.json").is_file():
        raise InputError(
            f"{words[0]} is an artifact, and the prompt is missing: `tutel-run generate {words[0]} PROMPT`."
        )
    *artifact, prompt = words
    prompt = _standard_input() if prompt == "-" else prompt
    if not prompt.strip():
        raise InputError("The prompt is empty: give some text.")
    return (artifact[0] if artifact else None), prompt


def _standard_input() -> str:
    if sys.stdin is None:
        raise InputError("The prompt is to come from standard input, which is closed.")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise InputError(f"The prompt on standard input is not UTF-8 text ({e.reason} at byte {e.start}).") from e


def _load(artifact: str | None, quiet: bool, options: dict) -> tuple:
    """(PackedModel, sampling options), of those that model_options and sampling_options leave. They are checked before,
    since loading takes its time."""
    sampling = {name: options.pop(name) for name in OPTIONS}
    folder = _folder(artifact, quiet)
    import torch

    from tutel_pack import load_packed
    from tutel_pack.kernels.ops import missing
    from tutel_pack.runtime.defaults import sampling_params
    from tutel_pack.spec import GENERAL

    with _option_names():
        sampling_params(folder, **sampling)
    dtype = options.pop("dtype")
    model = load_packed(folder, dtype=dtype and getattr(torch, dtype), **options)
    if model.path == GENERAL and not quiet:
        click.echo("Note: this architecture runs through its transformers module, which is slower.", err=True)
    slow = missing("cpu", torch.device("cpu")) if options["backend"] == "auto" and model.device.type == "cpu" else ""
    if slow and not quiet:
        click.echo(f"Note: torch's slower operations are used, for native kernels cannot be had: {slow}.", err=True)
    if options["act"] and not quiet:
        click.echo(f"Note: activations of experts are quantized to {options['act']}.", err=True)
    return model, sampling


@contextmanager
def _option_names() -> Iterator[None]:
    """Errors that name a parameter name the option instead."""
    try:
        yield
    except InputError as e:
        name, _, rest = str(e).partition(" ")
        raise InputError(f"{OPTIONS.get(name, name)} {rest}") from e


def _folder(artifact: str | None, quiet: bool) -> Path:
    """Where the artifact is, said on standard error if it was not named."""
    name, whence = artifact, None
    if name is None:
        name, whence = os.environ.get("TUTEL_MODEL"), "$TUTEL_MODEL"
    if not name:
        name, whence = recent.recall(), "the latest conversion"
    if not name:
        raise InputError(
            "No model is named: give an artifact's folder, set TUTEL_MODEL, or convert a checkpoint first with "
            "`tutel-convert MODEL`."
        )
    if whence and not Path(name).exists():
        raise InputError(f"{name} ({whence}) does not exist: name an artifact's folder.")
    if whence and not quiet:
        click.echo(f"Model: {name} ({whence})", err=True)
    if not Path(name).exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
        raise InputError(
            f"There is no folder {name}. If it is a checkpoint on the Hub, convert it: `tutel-convert {name}`; "
            f"if it is an artifact there, download it: `hf download {name} --local-dir {Path(name).name}`."
        )
    return Path(name)


def _events(model, prompt: str, raw: bool, system: str | None, sampling: dict) -> Iterator:
    from tutel_pack.runtime import engine
    from tutel_pack.runtime.chat import has_template

    if raw or (system is None and not has_template(model.tokenizer)):
        return engine.generate(model, prompt, stream=True, **sampling)
    return engine.chat(model, prompt, system=system, stream=True, **sampling)


def _show(events: Iterator):
    """Print the text of one sequence as it comes; its Result."""
    for event in events:
        click.echo(event.text, nl=False)
    return event.result


def _facts(result) -> dict:
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": len(result.tokens),
        "prompt_seconds": round(result.prompt_seconds, 4),
        "generation_seconds": round(result.seconds, 4),
    }


def _statistics(result, context: int) -> str:
    prompt = f"Prompt {_tokens(result.prompt_tokens)}{_rate(result.prompt_tokens, result.prompt_seconds)}"
    answer = f"Answer {_tokens(len(result.tokens))}{_rate(len(result.tokens) - 1, result.seconds)}"
    full = result.prompt_tokens + len(result.tokens) >= context
    cut = f"cut off: the context of {context} is full" if full else "cut off at the token limit"
    return f"{prompt}. {answer}, {cut if result.finish_reason == 'length' else 'complete'}."


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""


def _lines(terminal: bool) -> Iterator[str]:
    """What the user types, until the input ends."""
    if not terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # importing it gives input() editing and a history
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            return click.echo(err=True)
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /exit leaves.", err=True)


def _answer(model, messages: list[dict], system: str | None, sampling: dict, terminal: bool, quiet: bool) -> list[dict]:
    """Print the model's answer. Returns the conversation with it, or without the last message if there was none."""
    from tutel_pack.runtime import engine

    pieces, reason = [], None
    try:
        for event in engine.chat(model, messages, system=system, stream=True, **sampling):
            click.echo(event.text, nl=False)
            pieces.append(event.text)
            reason = event.finish_reason
    except (KeyboardInterrupt, InputError) as e:
        if not terminal:
            raise
        click.echo(f"Error: {e} /reset starts over." if isinstance(e, InputError) else " [stopped]", err=True, nl=False)
    click.echo()
    if reason == "length" and not quiet:
        click.echo("[cut off at the token limit]", err=True)
    return [*messages, {"role": "assistant", "content": "".join(pieces)}] if pieces else messages[:-1]


if __name__ == "__main__":
    main(prog_name="tutel-run")
