"""Kernels compiled for chips that are not here, and what can be told of the machine code.

What is counted of a loop is what one thread executes in one pass; weights are those that a thread decodes in it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from tutel_pack.kernels.triton.chips import Chip
from tutel_pack.kernels.triton.launch import TRITON, Launch

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_NVIDIA_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"

VERSION = "{}.{}".format(*TRITON)
"""Of Triton, as bench/kernels_aot.json is kept by."""

MATRIX = {
    "mma": r"\bmma\.sync\.\S+",
    "wgmma": r"\bwgmma\.mma_async\.\S+",
    "tcgen05": r"\btcgen05\.mma\.\S+",
    "mfma": r"\bv_mfma_\S+",
}
"""What matrix instructions look like in PTX and in AMD's assembly."""

_SYNONYMS = {
    "kind::mxf8f6f4.block_scale.scale_vec::1X": "kind::mxf8f6f4.block_scale.block32",
    "kind::mxf4nvf4.block_scale.scale_vec::4X": "kind::mxf4nvf4.block_scale.block16",
}
"""PTX ISA, "tcgen05.mma", has two names for the blocks of a scale. Triton 3.6 writes the first, 3.9 the second."""


@dataclass(frozen=True)
class Instruction:
    """target: where it may jump to, None if it does not jump.  falls: the next one may follow."""

    op: str
    target: int | None
    falls: bool


@dataclass(frozen=True)
class Compiled:
    """spills: bytes, or registers on AMD's chips.  matrix_instructions: their full names, each once.
    loop: opcodes of the loop that multiplies, by their count."""

    assembly: str
    shared: int
    registers: int
    spills: int
    matrix_instructions: tuple[str, ...]
    loop: Counter[str]

    @property
    def int_ops(self) -> int:
        """Integer instructions of the loop, those for addresses and conditions among them."""
        return sum(n for op, n in self.loop.items() if _is_integer(op))

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes from global memory in the loop."""
        return sum(n for op, n in self.loop.items() if re.match(r"LDG\S*\.128|(global|buffer)_load\S*_dwordx4", op))


def _is_integer(op: str) -> bool:
    if op.startswith("v_"):
        return not re.match(r"v_(mfma|accvgpr|cvt)|v_\S*_(f32|f16|bf16)", op)
    return bool(re.match(r"LOP3|PLOP3|SHF|PRMT|IMAD|IADD|VIADD|LEA|SEL|ISETP|IMNMX|VIMNMX|MOV", op))


def compile_for(chip: Chip, launch: Launch) -> Compiled:
    """Raises what the compiler raises. A process is to compile for one of AMD's chips only: Triton 3.6 converts fp8 as
    the first of them does for all that follow."""
    types, constants, attributes = _signature(launch.kernel, launch.arguments)
    source = ASTSource(launch.kernel, types, constants, attributes)
    arch = int(chip.name.removeprefix("sm_")) if chip.vendor == "cuda" else chip.name
    return _facts(chip, triton.compile(source, target=GPUTarget(chip.vendor, arch, chip.warp), options=launch.options))


def compile_here(chip: Chip, launch: Launch) -> Compiled:
    """The same for the GPU that is here, by `Launch.compile`."""
    return _facts(chip, launch.compile())


def _facts(chip: Chip, made: CompiledKernel) -> Compiled:
    if chip.vendor == "cuda":
        return _from_nvidia(made.asm["ptx"], made.asm["cubin"], made.metadata.shared)
    return _from_amd(made.asm["amdgcn"], made.metadata.shared)


def _signature(kernel: JITFunction, arguments: dict) -> tuple[dict, dict, dict]:
    """Types, constants and attributes as Triton would find them at a launch."""
    types, constants, attributes = {}, {}, {}
    for i, p in enumerate(kernel.params):
        value = arguments[p.name]
        types[p.name], is_constant = _type_of(value), p.is_constexpr or value is None
        if is_constant or (type(value) is int and value == 1 and not p.do_not_specialize):
            types[p.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and not p.do_not_specialize):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def _type_of(value) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if type(value) is int and -(2**31) <= value < 2**31 else "i64"


def _matrix_instructions(assembly: str) -> tuple[str, ...]:
    return tuple(sorted({name for pattern in MATRIX.values() for name in re.findall(pattern, assembly)}))


def _from_nvidia(ptx: str, cubin: bytes, shared: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    for name, other in _SYNONYMS.items():
        ptx = ptx.replace(name, other)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    # Local memory holds what does not fit the registers; no kernel here has arrays of its own.
    spills = int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1])
    return Compiled(ptx, shared, registers, spills, _matrix_instructions(ptx), _main_loop(_nvidia_program(code)))


def _nvidia_program(sass: str) -> list[Instruction]:
    lines = [(int(address, 16), text) for address, text in re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?);", sass, re.M)]
    place = {address: i for i, (address, _) in enumerate(lines)}
    program = []
    for _, text in lines:
        guard, op, rest = re.fullmatch(r"(@\S+ )?(\S+)(.*)", text).groups()
        target = re.search(r"0x[0-9a-f]+", rest) if op.startswith("BRA") else None
        falls = bool(guard) or "UP" in rest or not op.startswith(("BRA", "EXIT", "RET"))
        program.append(Instruction(op, target and place[int(target[0], 16)], falls))
    return program


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_NVIDIA_TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def _from_amd(assembly: str, shared: int) -> Compiled:
    facts = {name: int(value) for name, value in re.findall(r"\.(\w+_spill_count|[va]gpr_count):\s+(\d+)", assembly)}
    spills = facts["vgpr_spill_count"] + facts["sgpr_spill_count"]
    loop = _main_loop(_amd_program(assembly))
    return Compiled(assembly, shared, facts["vgpr_count"], spills, _matrix_instructions(assembly), loop)


def _amd_program(assembly: str) -> list[Instruction]:
    lines = re.findall(r"^(?:(\.LBB\w+):|\t([a-z]\w+)(.*))", assembly, re.M)
    place, instructions = {}, []
    for label, op, rest in lines:
        if label:
            place[label] = len(instructions)
        else:
            instructions.append((op, rest))
    program = []
    for op, rest in instructions:
        target = re.search(r"\.LBB\w+", rest) if op.startswith(("s_branch", "s_cbranch")) else None
        program.append(Instruction(op, target and place[target[0]], not op.startswith(("s_branch", "s_endpgm"))))
    return program


def _main_loop(program: list[Instruction]) -> Counter[str]:
    """Of all loops the innermost with most matrix instructions, or the longest if there are none."""
    loops = [[program[i].op for i in body] for body in _loops(program)]
    matrix = [sum("mfma" in op or "MMA" in op for op in body) for body in loops]
    if any(matrix):
        return Counter(min((body for body, n in zip(loops, matrix) if n == max(matrix)), key=len))
    return Counter(max(loops, key=len, default=[]))


def _loops(program: list[Instruction]) -> list[set[int]]:
    """Of every head what is executed between it and the jumps back to it, wherever it stands in memory."""
    before: dict[int, set[int]] = {}
    back: dict[int, set[int]] = {}
    seen, path = set(), set()
    stack = [(0, iter(_next(program, 0)))]
    while stack:
        i, following = stack[-1]
        seen.add(i)
        path.add(i)
        for j in following:
            before.setdefault(j, set()).add(i)
            if j in path:
                back.setdefault(j, set()).add(i)
            elif j not in seen:
                stack.append((j, iter(_next(program, j))))
                break
        else:
            path.discard(i)
            stack.pop()
    return [_between(head, tails, before) for head, tails in back.items()]


def _next(program: list[Instruction], i: int) -> list[int]:
    falls = [i + 1] if program[i].falls and i + 1 < len(program) else []
    return falls if program[i].target is None else [*falls, program[i].target]


def _between(head: int, tails: set[int], before: dict[int, set[int]]) -> set[int]:
    body, todo = {head}, list(tails)
    while todo:
        i = todo.pop()
        if i not in body:
            body.add(i)
            todo.extend(before.get(i, ()))
    return body
