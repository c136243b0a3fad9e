"""Triton's kernels compiled for five chips, none of which need be here, and their machine code looked at."""

from __future__ import annotations

import json
import multiprocessing
import re
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tutel_pack.kernels.triton.aot import MATRIX, VERSION, Compiled, Instruction, _main_loop, compile_for
from tutel_pack.kernels.triton.chips import CHIPS
from tutel_pack.kernels.triton.variants import Variant, all_variants, compiled, gate_up

COUNTS = json.loads((Path(__file__).parents[2] / "bench" / "kernels_aot.json").read_text())
"""Integer instructions for a decoded weight by version of Triton, as bench/kernels_aot.py last found them."""

SLACK = 1.03

UNITS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}

QUICK = [
    *(f"gate_up {fmt} 16" for fmt in ("mxfp4", "nvfp4", "fp8", "bf16")),  # decoding
    "gate_up mxfp4 128",  # prefill
    "sort_pairs",
    "gate_up mxfp8 x mxfp4 16",
    "gate_up nvfp4 x nvfp4 16",
    "gate_up fp8 x fp8 16",
    "attend 8 heads",
    "attend latents",
    "place normed heads",
    "route grouped sigmoid 256",
]
"""For `make test`; the rest is marked slow."""

VARIANTS = {chip.name: all_variants(chip) for chip in CHIPS.values()}
CASES = [
    pytest.param(chip, name, id=f"{chip}-{name}", marks=() if name in QUICK else pytest.mark.slow)
    for chip, variants in VARIANTS.items()
    for name in variants
]


@pytest.fixture(scope="module")
def results(request) -> dict[tuple[str, str], Future[Compiled]]:
    """Of all cases that are to run, by a process for each chip: see `compile_for`."""
    items = [i for i in request.session.items if getattr(i, "originalname", "") == test_machine_code.__name__]
    wanted = dict.fromkeys((item.callspec.params["chip"], item.callspec.params["name"]) for item in items)
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {chip: stack.enter_context(ProcessPoolExecutor(1, spawn)) for chip in CHIPS}  # they start when asked
        yield {(chip, name): pools[chip].submit(compiled, chip, name) for chip, name in wanted}


@pytest.mark.parametrize("chip, name", CASES)
def test_machine_code(chip, name, results):
    made, variant, limits = results[chip, name].result(), VARIANTS[chip][name], CHIPS[chip]
    assert made.spills == 0
    assert made.shared <= limits.shared and 0 < made.registers <= limits.registers
    if variant.tile is None:
        check_unit(chip, name, made)
        return
    check_instruction(chip, name, made)
    if variant.launch.arguments["ACT"]:
        check_quantized(chip, name, made)
    else:
        check_loads(chip, name, made)
        check_conversions(chip, made, variant)
    assert VERSION in COUNTS, f"nothing was counted by Triton {VERSION}: python bench/kernels_aot.py --write"
    assert variant.int_ops_per_weight(limits, made) <= SLACK * COUNTS[VERSION][chip][name]


def check_loads(chip: str, name: str, made: Compiled) -> None:
    limits = CHIPS[chip]
    assert made.wide_loads >= VARIANTS[chip][name].loads_of_a_thread(limits)
    if limits.vendor == "cuda":
        # Weights and tokens are copied to shared memory; only scales are loaded in smaller pieces, into registers.
        copies = [op for op in made.loop if op.startswith("LDGSTS")]
        assert copies and all(op.endswith(".128") for op in copies)


CONVERSIONS = {
    ("gfx942", "fp8"): r"v_cvt_pk_f32_fp8",
    ("gfx950", "fp8"): r"v_cvt_scalef32_pk_(bf16|f16)_fp8",
    ("gfx950", "mxfp4"): r"v_cvt_scalef32_pk_(bf16|f16)_fp4",
    ("gfx950", "nvfp4"): r"v_cvt_scalef32_pk_f32_fp4",
    ("sm_100", "fp8"): r"F2FP\.BF16\.E4M3",
}
"""Of a chip and a format: the instruction that makes two weights what is multiplied, or leads there."""
if VERSION == "3.6":  # by way of float16
    CONVERSIONS["sm_100", "fp8"] = r"F2FP\.F16\.E4M3"


def check_conversions(chip: str, made: Compiled, variant: Variant) -> None:
    wanted = CONVERSIONS.get((chip, variant.launch.arguments["FMT"]))
    if wanted:
        found = sum(n for op, n in made.loop.items() if re.match(wanted, op))
        once = variant.weights_of_a_thread(CHIPS[chip]) / 2
        assert found and found % once == 0  # more than once where warps share rows
    # AMD's matrix instructions must wait for what a vector unit wrote just before, and the compiler sees to it, but not
    # for inline assembly. (It gives decoded weights to shared memory, from where they are read.)
    assert not fed_by_inline_assembly(made.assembly)


def fed_by_inline_assembly(assembly: str) -> bool:
    """Whether a matrix instruction of AMD's reads a register that inline assembly was the last to write."""
    inline, written = False, set()
    for line in assembly.splitlines():
        if ";#ASM" in line:
            inline = "ASMSTART" in line
        elif found := re.match(r"\t([vd]\w+)\s+(.*)", line):
            op, (to, *operands) = found[1], found[2].split(",")
            if op.startswith("v_mfma") and any(written & _registers(o) for o in operands):
                return True
            written = written | _registers(to) if inline else written - _registers(to)
    return False


def _registers(operand: str) -> set[int]:
    """Of "v7" or "v[6:7]"."""
    numbers = re.match(r"\s*v\[?(\d+)(?::(\d+))?", operand)
    return set(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)) if numbers else set()


@pytest.mark.parametrize("between, fed", [("", True), ("\tds_read_b64 v[4:5], v9\n", False)], ids=["fed", "not fed"])
def test_matrix_instructions_fed_by_inline_assembly_are_seen(between, fed):
    inline = "\t;;#ASMSTART\n\tv_perm_b32 v5, v1, v2, s3\n\t;;#ASMEND\n"
    assert fed_by_inline_assembly(inline + between + "\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]\n") == fed


OPERANDS = {
    ("sm_90", "fp8"): r"wgmma\S*\.f32\.e4m3\.e4m3",
    ("sm_100", "fp8"): r"tcgen05\.mma\S*\.kind::f8f6f4",
    ("sm_100", "mxfp8"): r"tcgen05\.mma\S*\.kind::mxf8f6f4\.block_scale\.block32",
    ("sm_100", "nvfp4"): r"tcgen05\.mma\S*\.kind::mxf4nvf4\.block_scale\.block16",
    ("gfx950", "fp8"): r"v_mfma_f32_\S*_f8f6f4(?!.*(cbsz|blgp))",  # e4m3 is what operands are if nothing else is said
    ("gfx950", "mxfp8"): r"v_mfma_scale_f32_\S*_f8f6f4(?!.*cbsz).* blgp:4",  # the second one is e2m1
}


def check_quantized(chip: str, name: str, made: Compiled) -> None:
    """Every matrix instruction multiplies both operands as they are stored, and no weight is decoded: its words are
    loaded 16 bytes at a time, or 8 where sm_100 spreads e2m1 to a byte each on the way to shared memory."""
    act, variant = VARIANTS[chip][name].launch.arguments["ACT"], VARIANTS[chip][name]
    anything, wanted = (re.compile(p) for p in (MATRIX[UNITS[chip]], OPERANDS[chip, act]))
    lines = [line for line in made.assembly.splitlines() if anything.search(line)]
    assert lines and all(wanted.search(line) for line in lines)
    narrow = sum(n for op, n in made.loop.items() if op.startswith("LDGSTS.E.64")) if act == "mxfp8" else 0
    assert made.wide_loads + narrow >= variant.loads_of_a_thread(CHIPS[chip])


def test_a_chip_without_the_instruction_is_seen():
    """Triton compiles what it would have to emulate without a complaint."""
    launch = VARIANTS["sm_100"]["gate_up mxfp8 x mxfp4 16"].launch
    made = compile_for(CHIPS["sm_90"], launch)
    assert made.matrix_instructions and not any("f8f6f4" in i or "e4m3" in i for i in made.matrix_instructions)
    with pytest.raises(KeyError):
        VARIANTS["sm_90"]["gate_up mxfp8 x mxfp4 16"]


def check_unit(chip: str, name: str, made: Compiled) -> None:
    """Of what is no product with a weight: attention has tiles of few heads, for which NVIDIA's warps work alone."""
    if not name.startswith("attend"):
        assert made.matrix_instructions == ()
        assert "sqrt.approx" not in made.assembly, "norms round their roots"
        return
    unit = "mma" if CHIPS[chip].vendor == "cuda" else "mfma"
    assert made.matrix_instructions and all(re.search(MATRIX[unit], i) for i in made.matrix_instructions)
    # Keys and values are read 16 bytes at a time, where a thread has as much of a step: blocks are no obstacle.
    a, warps = VARIANTS[chip][name].launch.arguments, VARIANTS[chip][name].launch.warps
    row = a["D"] + a["E"] if a["values"] is None else 2 * a["D"]
    assert made.wide_loads >= a["BN"] * row * 2 // (CHIPS[chip].warp * warps) // 16


def check_instruction(chip: str, name: str, made: Compiled) -> None:
    """It is the one that the table of tiles states, with float16 for bfloat16 where that is what is multiplied."""
    stated = VARIANTS[chip][name].tile.instruction
    if name.endswith("float16"):
        stated = stated.replace("bf16", "f16")
    assert made.matrix_instructions == (stated,)
    assert re.search(MATRIX[UNITS[chip]], stated)


def test_compilations_are_few():
    quick = [case for case in CASES if not case.marks]
    assert len(quick) + 4 <= 60, "with those beside them"
    assert {name for case in quick for name in case.values[1:]} == set(QUICK)


@pytest.mark.parametrize("fmt, unit", [("fp8", "wgmma"), pytest.param("int4", None, marks=pytest.mark.slow)])
def test_float32_tokens_fit(fmt, unit):
    """In the largest tile: as parts that matrix units take, or as they are where decoded weights are no bfloat16."""
    chip = CHIPS["sm_90"]
    variant = gate_up(chip, fmt, 128, torch.float32)
    made = compile_for(chip, variant.launch)
    if unit:
        assert made.matrix_instructions and all(re.search(MATRIX[unit], i) for i in made.matrix_instructions)
    else:
        assert made.matrix_instructions == () and any(op.startswith("FFMA") for op in made.loop)
    assert variant.tile.bm == 32
    assert made.spills == 0 and made.shared <= chip.shared


def test_a_loop_may_be_entered_in_its_middle():
    """As Triton 3.6's for 128 tokens on gfx942 is, where the way back then leads to the kernel's beginning."""
    program = [Instruction("s_cbranch", 2, True), Instruction("v_mfma", None, True), Instruction("s_branch", 1, False)]
    assert _main_loop(program)["v_mfma"] == 1


def test_a_tile_that_is_too_large_is_seen():
    """Triton compiles it without a complaint, for a chip that cannot hold it."""
    chip = CHIPS["gfx942"]
    launch = VARIANTS["gfx942"]["gate_up bf16 128"].launch
    too_large = replace(launch, arguments={**launch.arguments, "BN": 256, "BK": 128}, stages=3)
    assert compile_for(chip, too_large).shared > chip.shared
