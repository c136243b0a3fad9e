"""The command `tutel-convert`. torch is imported only when there is work, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import click
from tqdm import tqdm

from tutel_pack import __version__, recent
from tutel_pack.commands import CONTEXT, Commands, size
from tutel_pack.errors import InputError

EPILOG = """
\b
Examples:
  tutel-convert Qwen/Qwen3-30B-A3B --fmt mxfp4
  tutel-convert ./checkpoint --fmt nvfp4 --override 'layers\\.(0|47)\\.=fp8' -o packed
  tutel-convert deepseek-ai/DeepSeek-V3 --dry-run

\b
Exit codes: 0 done, 2 bad input, 3 space, memory or network lacking, 130 interrupted.
Completion in bash: eval "$(_TUTEL_CONVERT_COMPLETE=bash_source tutel-convert)"
(zsh_source and fish_source likewise).
"""
ARTIFACT = click.argument("artifact", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")


class Override(click.ParamType):
    """REGEX=FMT as a pair."""

    name = "REGEX=FMT"

    def convert(self, value, param, ctx):
        pattern, equals, fmt = value.rpartition("=")
        if not equals or not pattern:
            self.fail(f"{value!r} is not of the form REGEX=FMT, such as 'self_attn=bf16'.", param, ctx)
        return pattern, fmt


@click.group(cls=Commands, default="pack", epilog=EPILOG, context_settings=CONTEXT)
@click.version_option(__version__, "--version", message="tutel-convert %(version)s")
def main():
    """Convert a Mixture-of-Experts checkpoint into a packed artifact.

    MODEL is a Hugging Face Hub id or a folder. Weights are streamed: memory stays small, and nothing of a Hub
    checkpoint is stored but the artifact. Run the result with tutel-run.
    """
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text, nor output UTF-8


@main.command()
@click.argument("model")
@click.option("--fmt", default="mxfp4", metavar="FMT", help="Format of the experts: fp8, mxfp4, nvfp4, bf16 or source.  [mxfp4]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="The artifact's folder.  [NAME-FMT]")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub checkpoint.  [main]")
@click.option("--rest", metavar="FMT", help="Format of attention, dense MLPs and head.  [fp8]")
@click.option("--override", "overrides", type=Override(), multiple=True, help="A format for tensors by name (repeatable).")
@click.option("--scales", metavar="RULE", help="How block scales are chosen.  [lsq; fp8: amax]")
@click.option("--dry-run", is_flag=True, help="Say what would be read and written, from headers alone.")
@click.option("--force", is_flag=True, help="Replace an artifact that is there already.")
@JSON
@click.option("-q", "--quiet", is_flag=True, help="Only errors on standard error.")
def pack(model, fmt, output, revision, rest, overrides, scales, dry_run, force, as_json, quiet):
    """Convert a checkpoint (the default command)."""
    from tutel_pack.convert import pipeline
    from tutel_pack.convert.output import check_output
    from tutel_pack.quant.recipe import Recipe

    output = output or pipeline.default_output(model, fmt)
    recipe = Recipe(fmt, rest, overrides, scales)
    if not dry_run:
        check_output(output, force)
    job = pipeline.plan(model, recipe, revision)
    facts = {"output": str(output), **plan_facts(job)}
    if dry_run:
        return click.echo(json.dumps(facts) if as_json else plan_text(facts))
    started = time.monotonic()
    with Progress(job.bytes_read, quiet) as progress:
        pipeline.run(job, output, force, progress)
    recent.remember(output)
    facts["seconds"] = round(time.monotonic() - started, 3)
    facts["errors"], facts["exact"] = _errors_by_format(output)
    if as_json:
        click.echo(json.dumps(facts))
    elif not quiet:
        click.echo(done_text(facts))


class Progress:
    """A bar on a terminal, a line per file elsewhere, nothing when quiet; all on standard error."""

    def __init__(self, total: int, quiet: bool):
        self._total, self._read, self._file = total, 0, ""
        self._lines = not quiet and not sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1000, disable=quiet or self._lines, smoothing=0.05)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc):
        self._bar.close()

    def __call__(self, file: str, read: int) -> None:
        self._read += read
        self._bar.update(read)
        if file != self._file:
            self._file = file
            self._bar.set_description(file.removesuffix(".safetensors"))
            if self._lines:
                self._say(f"{file}: {self._read / self._total:.0%} of {size(self._total)} read")

    def _say(self, line: str) -> None:
        try:
            click.echo(line, err=True)
        except BrokenPipeError:  # nobody reads the lines any more, which is no reason to stop the work
            self._lines = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def plan_facts(job) -> dict:
    """What a conversion will do, in plain JSON types. Sizes are bytes."""
    formats = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for entry in job.entries.values():
        name = entry.format.name if entry.format else "plain"
        formats[name]["tensors"] += 1
        formats[name]["bytes"] += entry.nbytes
    return {
        "source": {"repo": job.source.name, "commit": job.source.commit},
        "layers": job.spec.depth,
        "bytes_read": job.bytes_read,
        "bytes_written": job.bytes_written,
        "formats": dict(formats),
        "skipped": job.skipped,
    }


def plan_text(facts: dict) -> str:
    commit = f" at {facts['source']['commit'][:12]}" if facts["source"]["commit"] else ""
    lines = [
        f"{facts['source']['repo']}{commit}, {facts['layers']} layers -> {facts['output']}",
        f"  read     {size(facts['bytes_read']):>10}",
        f"  write    {size(facts['bytes_written']):>10}   (also the memory that running it needs, plus the cache)",
    ]
    for name, count in facts["formats"].items():
        lines.append(f"    {name:<6} {size(count['bytes']):>10}   {count['tensors']} tensors")
    reasons = defaultdict(list)
    for name, reason in facts["skipped"].items():
        reasons[reason].append(name)
    for reason, names in reasons.items():
        lines.append(f"  leaves out {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {reason}")
    return "\n".join(lines)


def done_text(facts: dict) -> str:
    rate = facts["bytes_read"] / max(facts["seconds"], 1e-9)
    errors = ", ".join(f"{name} {rms:.2%}" for name, rms in facts["errors"].items())
    lines = [
        f"{facts['output']}: {size(facts['bytes_written'])} from {size(facts['bytes_read'])} "
        f"in {facts['seconds']:.1f} s ({size(rate)}/s)",
    ]
    if errors:
        lines.append(f"Relative error of what was quantized: {errors}")
    if facts["exact"]:
        lines.append(f"Cast from another format without loss: {facts['exact']} tensors")
    return "\n".join(lines)


def _errors_by_format(output: Path) -> tuple[dict[str, float], int]:
    """(format -> root mean square of the relative errors of its tensors, how many others were cast without loss)."""
    from tutel_pack.artifact import Artifact

    manifest = Artifact(output).manifest
    found = defaultdict(list)
    lossy = {name: error["rms"] for name, error in manifest.errors.items() if "exact" not in error}
    for name, rms in lossy.items():
        found[manifest.tensors[name].format.name].append(rms**2)
    means = {name: (sum(squares) / len(squares)) ** 0.5 for name, squares in found.items()}
    return means, len(manifest.errors) - len(lossy)


@main.command()
@ARTIFACT
@JSON
def inspect(artifact, as_json):
    """Show what an artifact holds."""
    from tutel_pack.artifact import Artifact

    found = Artifact(artifact)
    if as_json:
        return click.echo(json.dumps(found.manifest.to_json()))
    manifest = found.manifest
    source = manifest.source["repo"] + (f" at {manifest.source['commit']}" if manifest.source["commit"] else "")
    recipe = ", ".join(f"{key} {value}" for key, value in manifest.recipe.items() if value)
    click.echo(f"{artifact}: {manifest.spec.family}, {manifest.spec.depth} layers, {size(found.nbytes)}")
    click.echo(f"  from {source}  ({recipe})")
    width = max(map(len, manifest.tensors), default=0)
    for name, entry in manifest.tensors.items():
        shape = "×".join(map(str, entry.shape))
        found = manifest.errors.get(name)
        error = "" if found is None else "exact" if "exact" in found else f"{found['rms']:.2%}"
        click.echo(f"  {name:<{width}}  {entry.format.name if entry.format else 'plain':<5}  {shape:>16}  {size(entry.nbytes):>9}  {error}".rstrip())


@main.command()
@ARTIFACT
@JSON
def verify(artifact, as_json):
    """Compare every file of an artifact with its digest."""
    from tutel_pack.artifact import Artifact

    found = Artifact(artifact)
    bad = found.verify(lambda files: tqdm(files, unit="file", disable=as_json or not sys.stderr.isatty()))
    if as_json:
        click.echo(json.dumps({"files": len(found.manifest.files), "damaged": bad}))
    if bad:
        raise InputError(f"{len(bad)} files of {artifact} are damaged ({', '.join(bad[:5])}): copy or convert it again.")
    if not as_json:
        click.echo(f"{artifact}: {len(found.manifest.files)} files, {size(found.nbytes)}, all as they were written.")
