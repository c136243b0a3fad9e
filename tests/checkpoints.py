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
