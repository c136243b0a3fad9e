"""Tiny checkpoints in their makers' layout, written with safetensors alone, and artifacts read back without our reader."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
ROOT = Path(__file__).resolve().parent.parent


def qwen3_config(**changes) -> dict:
    """A Qwen3-MoE of three layers with a dense one between. 12 experts: as text, 10 sorts before 2. No size divides by 128."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
        "hidden_size": 160, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "attention_bias": False,
        "num_hidden_layers": 3, "mlp_only_layers": [1], "decoder_sparse_step": 1, "intermediate_size": 192,
        "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
        "vocab_size": 150, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": None, "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False,
    } | changes  # fmt: skip


def qwen3_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model under the names of its Hub files, in the order in which a module lists them."""
    h, d = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for layer in range(config["num_hidden_layers"]):
        found = {"input_layernorm": (h,), "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                 "self_attn.o_proj": (h, q), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "post_attention_layernorm": (h,)}
        if layer in config["mlp_only_layers"]:
            found |= _gated("mlp", config["intermediate_size"], h)
        else:
            found["mlp.gate"] = (config["num_experts"], h)
            for e in range(config["num_experts"]):
                found |= _gated(f"mlp.experts.{e}", config["moe_intermediate_size"], h)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in found.items()}
    shapes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    return shapes


def _gated(prefix: str, i: int, h: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.gate_proj": (i, h), f"{prefix}.up_proj": (i, h), f"{prefix}.down_proj": (h, i)}


def qwen3_weights(config: dict, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Values that follow from a tensor's name, so that no two tensors are alike and their order shows."""
    return {name: values(name, shape).to(dtype) for name, shape in qwen3_shapes(config).items()}


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    x = torch.randn(shape, generator=generator) * 0.05
    return 1 + x if len(shape) == 1 else x


def experts(weights: dict[str, Tensor], layer: int, count: int = 12) -> tuple[Tensor, Tensor]:
    """(gate_up [E, 2I, H], down [E, H, I]) of a layer, put together here and in order."""
    at = f"model.layers.{layer}.mlp.experts."
    gate_up = [torch.cat([weights[f"{at}{e}.gate_proj.weight"], weights[f"{at}{e}.up_proj.weight"]]) for e in range(count)]
    return torch.stack(gate_up), torch.stack([weights[f"{at}{e}.down_proj.weight"] for e in range(count)])


def fuse(weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same checkpoint with one tensor per layer for all experts."""
    fused = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer in set(range(config["num_hidden_layers"])) - set(config["mlp_only_layers"]):
        gate_up, down = experts(weights, layer, config["num_experts"])
        at = f"model.layers.{layer}.mlp.experts."
        fused |= {at + "gate_up_proj": gate_up, at + "down_proj": down}
    return fused


def quantize_fp8(w: Tensor, block: tuple[int, int] = (128, 128), scale_dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """(q, scale) as DeepSeek's block-FP8 has them, with scales that no rule of ours would choose."""
    rows, columns = block
    grid = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
    scale = torch.rand(grid, generator=torch.Generator().manual_seed(w.numel())).add(0.5).mul(0.001).to(scale_dtype)
    return (w.float() / spread(scale, block, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def spread(scale: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """The scale of every element, by indexing."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scale.float()[rows[:, None], columns[None, :]]


def to_fp8(weights: dict[str, Tensor], pattern=r"_proj\.weight", block=(128, 128), scale_dtype=torch.float32) -> dict[str, Tensor]:
    """A block-FP8 checkpoint: what matches is quantized and gets a scale of the usual name."""
    found = {}
    for name, w in weights.items():
        found[name] = w
        if re.search(pattern, name):
            found[name], found[name + "_scale_inv"] = quantize_fp8(w, block, scale_dtype)
    return found


def fp8_config(block=(128, 128), **changes) -> dict:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return qwen3_config(quantization_config=quantization, **changes)


def write_checkpoint(folder: Path, weights: dict[str, Tensor], config, shards: int = 2) -> Path:
    """Neighbours go to different shards, so gate and up, or weight and scale, are never in one file (of two)."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(weights)
    if shards == 1:
        save_file({n: weights[n].contiguous() for n in names}, folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            save_file({n: weights[n].contiguous() for n in names[i::shards]}, folder / file, metadata={"format": "pt"})
        places = {n: files[i % shards] for i, n in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "tokenizer.json").write_text('{"of": "a test"}')
    return folder


def write_layers(folder: Path, config: dict, noise: Tensor) -> Path:
    """A checkpoint of one shard per layer and one for the rest. Every tensor is the beginning of `noise`, which is quick."""
    folder.mkdir(parents=True)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, shape in qwen3_shapes(config).items():
        file = f"layer-{name.split('.')[2]}.safetensors" if name.startswith("model.layers.") else "rest.safetensors"
        shards.setdefault(file, {})[name] = noise[: math.prod(shape)].view(shape)
    for file, tensors in shards.items():
        save_file({name: t.clone() for name, t in tensors.items()}, folder / file)  # it refuses tensors that share memory
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_MEASURED = """
import json, re, sys, time
import torch
from tutel_pack.convert import layout, pipeline
source, out, fmt, unit, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
layout.UNIT_ELEMENTS = int(unit)
exec(sys.stdin.read())
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what the imports hold
imports, started = peak(), time.monotonic()
pipeline.convert_checkpoint(source, out, fmt=fmt)
print(json.dumps({"seconds": time.monotonic() - started, "peak": peak() - imports}))
"""


def measured(source: Path, out: Path, fmt: str, unit: int = 1 << 25, threads: int = 1, before: str = "") -> dict:
    """A conversion in a process of its own: its seconds, and the bytes of its peak above what the imports hold."""
    args = [sys.executable, "-c", _MEASURED, *map(str, (source, out, fmt, unit, threads))]
    done = subprocess.run(args, cwd=ROOT, input=before, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def read_stored(artifact: Path) -> dict[str, Tensor]:
    """Everything in an artifact's safetensors files by their own loader, paddings left out."""
    found = {}
    for file in sorted(artifact.glob("*.safetensors")):
        found |= {name: t for name, t in load_file(file).items() if not name.startswith("__pad.")}
    return found


GARBAGE = (None, "x", 1, -1, 1.5, True, [], {}, [[]], {"a": {}}, 10**30, float("nan"), "\ud800", "a\nb")


def garbled(data: dict) -> Iterator[dict]:
    """A JSON object with something else in one of its places, each in turn, or with one of its keys left out."""
    for place in filter(None, _places(data)):
        for value in (*GARBAGE, _places):
            bad = at = copy.deepcopy(data)
            for key in place[:-1]:
                at = at[key]
            if value is _places:
                del at[place[-1]]
            else:
                at[place[-1]] = value
            yield bad


def _places(data, prefix: tuple = ()) -> Iterator[tuple]:
    """The keys to every value in a JSON value, of a list the first item's only."""
    yield prefix
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, value in items:
        yield from _places(value, (*prefix, key))


def tree(folder: Path, pattern: str = "**/*") -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob(pattern)) if path.is_file()}


def tutel_convert(*args, before: str = "", cwd=None, env: dict | None = None, **options) -> subprocess.Popen:
    """The command in a process of its own. before: Python that runs first, such as to break something."""
    code = f"{before}\nfrom tutel_pack.convert.cli import main\nmain(prog_name='tutel-convert')"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_TOKEN": ""} | (env or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=cwd, env=env, text=True, **pipes)


def finish(process: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def forked(folder: Path, *args, before: str = "", timeout: float = 60) -> tuple[int, str, str]:
    """What `tutel_convert` and `finish` give, in a process that need not import torch first: seconds less.

    Its directory and home are `folder`, which must exist; its output passes through files beside it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tutel_pack.convert.cli", "tutel_pack.convert.pipeline", "tests.checkpoints"])
    texts = [tempfile.NamedTemporaryFile("r", newline="") for _ in range(2)]
    process = context.Process(target=_in_fork, args=(str(folder), [t.name for t in texts], list(map(str, args)), before))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"tutel-convert {args} takes more than {timeout} s")
    return process.exitcode, *(t.read() for t in texts)


def _in_fork(folder: str, files: list[str], args: list[str], before: str) -> None:
    os.chdir(folder)
    os.environ["XDG_STATE_HOME"] = folder
    for number, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, errors=errors) for number, errors in ((1, "strict"), (2, "backslashreplace")))
    exec(before, {})
    from tutel_pack.convert.cli import main

    main(args, prog_name="tutel-convert")


# Quantized layouts of makers, with random bytes: every code point, and scales that no rule of ours would choose


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any float8_e4m3fn but NaN."""
    codes = _codes(shape, generator)
    return codes.masked_fill(codes & 127 == 127, 0).view(torch.float8_e4m3fn)


def _e8m0(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """uint8; 0, which is 2^−127, is among them."""
    codes = torch.randint(110, 128, shape, generator=generator, dtype=torch.uint8)
    codes.view(-1)[0] = 0
    return codes


def _float_scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 0.002 + 0.001


def _nvfp4_scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(1, 127, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _fp8(suffix: str, grid, scales=_float_scales, dtype=torch.float32):
    """Maker of F8_E4M3 with a scale. suffix: of the scale's name, which starts at the weight's base; grid: its shape from [N, K]."""
    return lambda base, shape, g: {base + ".weight": _e4m3(shape, g), base + suffix: scales(grid(shape), g).to(dtype)}


def _fp8_e8m0(suffix: str, block: tuple[int, int], dtype=torch.float8_e8m0fnu):
    return lambda base, shape, g: {base + ".weight": _e4m3(shape, g), base + suffix: _e8m0(_grid(shape, block), g).view(dtype)}


def _mxfp4(weight: str, scale: str, weight_dtype=torch.uint8, scale_dtype=torch.uint8):
    def make(base, shape, g):
        n, k = shape
        return {base + weight: _codes((n, k // 2), g).view(weight_dtype), base + scale: _e8m0((n, k // 32), g).view(scale_dtype)}

    return make


def _nvfp4_modelopt(base, shape, g, inputs: bool = True):
    n, k = shape
    found = {base + ".weight": _codes((n, k // 2), g), base + ".weight_scale": _nvfp4_scales((n, k // 16), g),
             base + ".weight_scale_2": _float_scales((), g)}  # fmt: skip
    return found | ({base + ".input_scale": torch.tensor(0.5)} if inputs else {})


def _nvfp4_ct(base, shape, g):
    n, k = shape
    return {base + ".weight_packed": _codes((n, k // 2), g), base + ".weight_scale": _nvfp4_scales((n, k // 16), g),
            base + ".weight_global_scale": 1 / _float_scales((1,), g), base + ".input_global_scale": torch.ones(1)}  # fmt: skip


def _int4_ct(base, shape, g):
    n, k = shape
    return {base + ".weight_packed": _codes((n, k // 2), g).view(torch.int32), base + ".weight_scale": _float_scales((n, k // 32), g).bfloat16(),
            base + ".weight_shape": torch.tensor(shape, dtype=torch.int32)}  # fmt: skip


def _ct_config(format_name: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    ignore = ["lm_head", "re:.*gate$", "re:never.matches"]
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}, "ignore": ignore}


def _fp8_method(block=None) -> dict:
    return {"quant_method": "fp8", "fmt": "e4m3"} | ({"weight_block_size": list(block)} if block else {})


LAYOUTS = {
    "fp8-block-scale_inv": (_fp8_method((128, 128)), _fp8(".weight_scale_inv", lambda s: _grid(s, (128, 128)))),
    "fp8-block-scale": (_fp8_method((128, 128)), _fp8(".scale", lambda s: _grid(s, (128, 128)))),
    "fp8-block-e8m0": (_fp8_method((128, 128)), _fp8_e8m0(".scale", (128, 128))),
    "fp8-block32-e8m0": (_fp8_method((32, 32)), _fp8_e8m0(".scale", (32, 32))),
    "fp8-block-bf16": (_fp8_method((128, 128)), _fp8(".weight_scale_inv", lambda s: _grid(s, (128, 128)), dtype=torch.bfloat16)),
    "fp8-block-ct": (_ct_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
                     _fp8(".weight_scale", lambda s: _grid(s, (128, 128)))),
    "fp8-channel": (_ct_config("float-quantized", num_bits=8, type="float", strategy="channel"), _fp8(".weight_scale", lambda s: (s[0], 1))),
    "fp8-channel-bf16": (_ct_config("float-quantized", num_bits=8, type="float", strategy="channel"),
                         _fp8(".weight_scale", lambda s: (s[0], 1), dtype=torch.bfloat16)),
    "fp8-channel-vector": ({"quant_method": "quark"}, _fp8(".weight_scale", lambda s: (s[0],))),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8(".weight_scale", lambda s: ())),
    "fp8-tensor-inv": (_fp8_method(), _fp8(".weight_scale_inv", lambda s: (1,), dtype=torch.bfloat16)),
    "mxfp8": (_fp8_method(), _fp8_e8m0(".weight_scale_inv", (1, 32), torch.uint8)),
    "mxfp4-v4": (_fp8_method((128, 128)), _mxfp4(".weight", ".scale", torch.int8, torch.float8_e8m0fnu)),
    "mxfp4-ct": (_ct_config("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), _mxfp4(".weight_packed", ".weight_scale")),
    "mxfp4-quark": ({"quant_method": "quark"}, _mxfp4(".weight", ".weight_scale")),
    "mxfp4-ling": (_fp8_method((128, 128)), _mxfp4(".weight", ".weight_scale_inv")),
    "nvfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4_modelopt),
    "nvfp4-modelopt-w4a16": ({"quant_method": "modelopt"}, lambda base, shape, g: _nvfp4_modelopt(base, shape, g, inputs=False)),
    "nvfp4-ct": (_ct_config("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), _nvfp4_ct),
    "int4-ct": (_ct_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32), _int4_ct),
}  # fmt: skip
"""Layout -> (quantization_config, maker). A maker takes a weight's name without ".weight", its [N, K] and a generator."""


def make_layout(layout: str, base: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The stored tensors of a weight, which follow from its name."""
    return LAYOUTS[layout][1](base, shape, torch.Generator().manual_seed(zlib.crc32(base.encode())))


def to_layout(layout: str, weights: dict[str, Tensor], pattern: str = r"_proj\.weight") -> dict[str, Tensor]:
    """A checkpoint whose weights that match are stored in a layout."""
    found = {}
    for name, w in weights.items():
        stored = re.search(pattern, name)
        found |= make_layout(layout, name.removesuffix(".weight"), tuple(w.shape)) if stored else {name: w}
    return found
