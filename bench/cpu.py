"""Tokens per second on this processor, beside its limits and beside others: `python bench/cpu.py --model qwen|gptoss`.

Makes a slice of the model (bench/slices.py) and what each engine reads of it, and runs the engines in rounds, each in
a process of its own and one at a time. A ratio is taken within a round, and limits are measured between the tokens that
are compared with them, so that a busy neighbour disturbs both sides: every number is a median with its extremes.

Engines: ours; transformers in bfloat16; llama.cpp, if it is in PATH or given by --llama-cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from llama_cpp import TYPES, LlamaCpp
from slices import CONFIGS, make_slice

LENGTHS = 512, 4096
"""Of the prompts."""
TOKENS = 48
"""That llama.cpp generates."""


class Slice:
    """What the engines read, made when first asked for and kept in a folder."""

    def __init__(self, work: Path, model: str, fmt: str):
        self._checkpoint, self._artifact = work / model, work / f"{model}-{fmt}"
        self._gguf = work / f"{model}-{fmt}.gguf"
        self._model, self._fmt = model, fmt

    @property
    def checkpoint(self) -> Path:
        if not (self._checkpoint / "config.json").exists():
            make_slice(self._model, self._checkpoint)
        return self._checkpoint

    @property
    def artifact(self) -> Path:
        if not self._artifact.exists():
            from tutel_pack.convert.pipeline import convert_checkpoint

            convert_checkpoint(self.checkpoint, self._artifact, fmt=self._fmt)
        return self._artifact

    def gguf(self, llama: LlamaCpp) -> Path:
        if not self._gguf.exists():
            llama.make(self.checkpoint, self._fmt, self._gguf)
        return self._gguf


def run(command: list, **environment: str) -> tuple[str, dict[str, int]]:
    """(standard output, the most memory of each kind) of a program."""
    words, environment = [str(word) for word in command], {**os.environ, **environment}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    most = {"anonymous": 0, "file_backed": 0, "all": 0}
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, most, done))
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{command[0]} failed with exit code {process.returncode}.")
    return output, most


def _watch(pid: int, most: dict[str, int], done: threading.Event) -> None:
    while not done.wait(0.05):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except ProcessLookupError:
            return
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        now = {"anonymous": sizes.get("RssAnon", 0), "file_backed": sizes.get("RssFile", 0), "all": sizes.get("VmRSS", 0)}
        most.update({kind: max(most[kind], size) for kind, size in now.items()})


def engines(made: Slice, threads: int, llama: LlamaCpp | None) -> dict[str, Callable[[], dict]]:
    """Name -> a run of that engine: {"decode": [tokens/s], "prefill": {length: [tokens/s]}, "memory", …}."""

    def python(name: str, folder: Path) -> dict:
        script = Path(__file__).with_name("engines.py")
        # As tutel-run sets it; transformers' users do not.
        waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if name == "ours" else {}
        output, memory = run([sys.executable, script, name, folder, "--threads", threads], **waiting)
        found = json.loads(output)
        decode = [1 / part["seconds"] for part in found["decode"]]
        prefill = {n: [int(n) / part["seconds"] for part in parts] for n, parts in found["prefill"].items()}
        return {"decode": decode, "prefill": prefill, "memory": memory, "found": found}

    def peer() -> dict:
        output, memory = run(llama.command(made.gguf(llama), threads, LENGTHS, TOKENS))
        return llama.rates(output) | {"memory": memory}

    ours = {"ours": lambda: python("ours", made.artifact)}
    others = {"transformers": lambda: python("transformers", made.checkpoint)}
    return ours | ({"llama.cpp": peer} if llama else {}) | others


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratios(ours: list[dict], theirs: list[dict] | None, rate: Callable[[dict], list[float]]) -> dict | None:
    """Of our rate to another engine's, round by round; None without the other."""
    if not theirs:
        return None
    return summary([statistics.median(rate(a)) / statistics.median(rate(b)) for a, b in zip(ours, theirs)])


def decode_report(runs: dict[str, list[dict]]) -> dict:
    ours = runs["ours"]
    parts = [(part, r["found"]["bytes_per_token"]) for r in ours for part in r["found"]["decode"]]
    used = [size / part["seconds"] / 1e9 for part, size in parts]
    outside = [r["found"]["outside_kernels"] for r in ours if r["found"]["outside_kernels"] is not None]
    return {
        "tokens_per_s": {name: summary([v for r in rs for v in r["decode"]]) for name, rs in runs.items()},
        "bytes_per_token": ours[0]["found"]["bytes_per_token"],
        "gb_per_s": summary(used),
        "read_gb_per_s": summary([part["read_gb_per_s"] for part, _ in parts]),
        "fraction_of_read_bandwidth": summary([u / part["read_gb_per_s"] for u, (part, _) in zip(used, parts)]),
        "fraction_outside_kernels": outside and summary(outside),
        **{f"vs_{key(name)}": ratios(ours, runs.get(name), lambda r: r["decode"]) for name in PEERS},
    }


def prefill_report(runs: dict[str, list[dict]], length: str) -> dict:
    ours = runs["ours"]
    parts = [(part, r["found"]["flops"][length]) for r in ours for part in r["found"]["prefill"][length]]
    done = [work / part["seconds"] for part, work in parts]
    return {
        "tokens_per_s": {name: summary([v for r in rs for v in r["prefill"][length]]) for name, rs in runs.items()},
        "tflops": summary([d / 1e12 for d in done]),
        "matmul_tflops": summary([part["matmul_flops_per_s"] / 1e12 for part, _ in parts]),
        "fraction_of_matmul_rate": summary([d / part["matmul_flops_per_s"] for d, (part, _) in zip(done, parts)]),
        **{f"vs_{key(name)}": ratios(ours, runs.get(name), lambda r: r["prefill"][length]) for name in PEERS},
    }


PEERS = "llama.cpp", "transformers"


def key(name: str) -> str:
    return name.replace(".", "_")


def report(runs: dict[str, list[dict]]) -> dict:
    """All numbers, each {"median", "lowest", "highest"}."""
    found = [r["found"] for r in runs["ours"]]
    imports = found[0]["memory"]["imports"]
    return {
        "decode": decode_report(runs),
        "prefill": {length: prefill_report(runs, length) for length in map(str, LENGTHS)},
        "load_seconds": {n: summary([r["found"]["load_seconds"] for r in rs]) for n, rs in runs.items() if "found" in rs[0]},
        "peak_rss_bytes": {n: max(r["memory"]["all"] for r in rs) for n, rs in runs.items()},
        "anonymous_bytes": {n: max(r["memory"]["anonymous"] for r in rs) for n, rs in runs.items()},
        "file_backed_bytes": {n: max(r["memory"]["file_backed"] for r in rs) for n, rs in runs.items()},
        "of_imports": {"anonymous_bytes": imports["anonymous"], "file_backed_bytes": imports["file_backed"]},
        "artifact_bytes": found[0]["artifact_bytes"],
    }


def flat(found: dict) -> dict:
    """The report with medians as plain numbers, and the extremes of the same places under "spread": for programs."""

    def pick(value, numbers: Callable[[dict], object]):
        if not isinstance(value, dict):
            return value
        return numbers(value) if "median" in value else {k: pick(v, numbers) for k, v in value.items()}

    out = pick(found, lambda v: v["median"])
    out["prefill"] = out["prefill"][str(LENGTHS[-1])] | {"by_length": out["prefill"]}
    for name in ("load_seconds", "peak_rss_bytes", "anonymous_bytes", "file_backed_bytes"):
        out[name], out[f"{name}_by_engine"] = out[name]["ours"], out[name]
    return out | {"spread": pick(found, lambda v: [v["lowest"], v["highest"]])}


def show(found: dict) -> None:
    decode = found["decode"]
    print(f"\nDecode, one token at a time ({decode['bytes_per_token'] / 1e6:.0f} MB a token)")
    _show_rows(decode, "gb_per_s", "read_gb_per_s", "fraction_of_read_bandwidth", "fraction_outside_kernels")
    for length, part in found["prefill"].items():
        print(f"\nPrefill of {length} tokens")
        _show_rows(part, "tflops", "matmul_tflops", "fraction_of_matmul_rate")
    print("\nMemory in GB, at most; seconds from imports to the first token")
    for name, size in found["peak_rss_bytes"].items():
        parts = f"{found['anonymous_bytes'][name] / 1e9:.2f} anonymous, {found['file_backed_bytes'][name] / 1e9:.2f} of files"
        load = found["load_seconds"].get(name)
        print(f"  {name:28}{size / 1e9:8.2f}  ({parts})" + (f", loaded in {load['median']:.2f} s" if load else ""))
    print(f"  {'the artifact':28}{found['artifact_bytes'] / 1e9:8.2f}")


def _show_rows(part: dict, *names: str) -> None:
    rows = {f"{name}, tokens/s": value for name, value in part["tokens_per_s"].items()}
    rows |= {name.replace("_", " "): part[name] for name in names}
    rows |= {f"ours to {name}": part[f"vs_{key(name)}"] for name in PEERS}
    for name, value in rows.items():
        numbers = "not there" if value is None else f"{value['median']:8.3g}   {value['lowest']:.3g} … {value['highest']:.3g}"
        print(f"  {name:28}{numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--fmt", choices=TYPES, default="mxfp4", help="of the artifact; llama.cpp gets its nearest relative")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where slices are made and kept: up to 25 GB  [the temporary folder]")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="llama.cpp's source and build  [programs in PATH]")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw cost against context and batch there instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir()) / "tutel-pack-bench"
    work.mkdir(parents=True, exist_ok=True)
    made = Slice(work, options.model, options.fmt)
    if options.plots:
        from scaling import plot

        return plot(made.artifact, options.threads, f"{options.model}-{options.fmt}", options.plots)
    llama = LlamaCpp.find(options.llama_cpp)
    jobs = engines(made, options.threads, llama)
    runs: dict[str, list[dict]] = {name: [] for name in jobs}
    for number in range(options.rounds):
        for name, job in jobs.items():
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            runs[name].append(job())
    found = report(runs)
    show(found)
    if options.json:
        facts = {"model": options.model, "fmt": options.fmt, "threads": options.threads, "rounds": options.rounds}
        options.json.write_text(json.dumps(facts | flat(found), indent=1))


if __name__ == "__main__":
    main()
