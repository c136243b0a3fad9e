"""The Triton kernels compiled for five chips, none of which need be here: `python bench/kernels_aot.py [--json FILE]`.

Prints for each chip and kernel the matrix instruction, what did not fit the registers, shared memory, registers, and
the integer instructions that it takes to decode one weight (of the loop along K, those for addresses included).
--write keeps the last in bench/kernels_aot.json by versions of Triton; tests hold the kernels to those of their own.
`make counts` does so for the newest and the oldest Triton there is support for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import triton

from tutel_pack.kernels.triton.aot import VERSION, Compiled
from tutel_pack.kernels.triton.chips import CHIPS
from tutel_pack.kernels.triton.variants import all_variants, compiled

COUNTS = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what is printed to a file")
    parser.add_argument("--write", action="store_true", help="renew bench/kernels_aot.json")
    parser.add_argument("--chips", default=",".join(CHIPS), help="some of them, by commas")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    rows = measure(options.chips.split(","), options.processes)
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1) + "\n")
    if options.write:
        write_counts(rows)


def measure(chips: list[str], processes: int) -> list[dict]:
    """A dictionary for each kernel on each chip, printed as it comes."""
    print(f"{'target':8}{'kernel':28}{'spills':>7}{'shared':>8}{'registers':>10}{'int/weight':>11}  matrix instruction")
    rows = []
    for chip in chips:  # by processes of its own, see `compile_for`
        names = list(all_variants(CHIPS[chip]))
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            for name, made in zip(names, pool.map(partial(compiled, chip), names)):
                rows.append(row(chip, name, made))
                print(line(rows[-1]), flush=True)
    return rows


def row(chip: str, name: str, made: Compiled) -> dict:
    variant = all_variants(CHIPS[chip])[name]
    per_weight = variant.int_ops_per_weight(CHIPS[chip], made)
    return {
        "name": name,
        "target": chip,
        "matmul": variant.tile is not None,
        "matrix_instruction": ", ".join(made.matrix_instructions) or None,
        "spills": made.spills,
        "shared_bytes": made.shared,
        "registers": made.registers,
        "int_ops_per_weight": per_weight and round(per_weight, 3),
    }


def line(row: dict) -> str:
    per_weight = "" if row["int_ops_per_weight"] is None else f"{row['int_ops_per_weight']:.2f}"
    numbers = f"{row['spills']:>7}{row['shared_bytes']:>8}{row['registers']:>10}{per_weight:>11}"
    return f"{row['target']:8}{row['name']:28}{numbers}  {row['matrix_instruction'] or '–'}"


def write_counts(rows: list[dict]) -> None:
    found = {r["target"]: {} for r in rows}
    for r in rows:
        if r["int_ops_per_weight"] is not None:
            found[r["target"]][r["name"]] = r["int_ops_per_weight"]
    counts = json.loads(COUNTS.read_text())
    counts.setdefault(VERSION, {}).update(found)
    COUNTS.write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
