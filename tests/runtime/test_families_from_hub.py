"""From a checkpoint in its maker's layout through conversion to logits, for families with grouped-query attention."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import spread, to_fp8
from tests.runtime.families import interleaved, make_model
from tests.runtime.test_decoder import FLOAT32_LIMIT, worst
from tests.runtime.test_families_gqa import CASES, FAMILIES, prompts
from tutel_pack.artifact import Artifact
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode
from tutel_pack.runtime.loader import load_packed

MAKERS = {
    "mixtral": (".block_sparse_moe.gate.", ".block_sparse_moe.experts.", ("w1", "w3", "w2")),
    "minimax_m2": (".block_sparse_moe.gate.", ".block_sparse_moe.experts.", ("w1", "w3", "w2")),
}
"""Family -> its spelling of routers, experts, and gate, up and down projections, where that is not transformers' own."""


def hub_tensors(model_type: str, model: torch.nn.Module) -> dict[str, Tensor]:
    """The model as its maker stores it, in bfloat16; corrections are float32."""
    tensors = {}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" not in name:
            p.copy_(p if "correction" in name else p.bfloat16())
            w = p.data if "correction" in name else p.bfloat16()
            tensors |= {n: t.contiguous() for n, t in _as_made(model_type, name, w)}
    return tensors


def _as_made(model_type: str, name: str, w: Tensor) -> list[tuple[str, Tensor]]:
    if model_type == "gpt_oss":
        return [(name, w)]
    if model_type == "granitemoe":
        for ours, made in (("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"),
                           ("router.weight", "router.layer.weight")):  # fmt: skip
            name = name.replace(ours, made)
        return [(name, w)]
    router, experts, (gate, up, down) = MAKERS.get(model_type, (".mlp.gate.", ".mlp.experts.", ("gate_proj", "up_proj", "down_proj")))
    name = name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics.").replace(".mlp.gate.", router)
    if model_type == "minimax_m2":
        name = name.replace(".mlp.e_score", ".block_sparse_moe.e_score")
    prefix = name.split(".mlp.")[0] + experts
    if name.endswith("experts.down_proj"):
        return [(f"{prefix}{e}.{down}.weight", expert) for e, expert in enumerate(w)]
    if name.endswith("experts.gate_up_proj"):
        halves = [expert.chunk(2) for expert in w]
        return [(f"{prefix}{e}.{part}.weight", half[i]) for e, half in enumerate(halves) for i, part in enumerate((gate, up))]
    return [(name, w)]


def convert(folder: Path, model: torch.nn.Module, tensors: dict[str, Tensor], fmt: str = "mxfp4", **config) -> Path:
    source = folder / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(model.config.to_dict() | config, default=str))
    return convert_checkpoint(str(source), folder / "packed", fmt=fmt)


ROUNDING = {"mxfp4": (0.05, 0.25), "fp8": (0.01, 0.06)}
"""Between which a packed row's largest error is, relative to its length. That of another row would be above 1."""


def give_rounded(model: torch.nn.Module, model_type: str, artifact: Artifact) -> None:
    """The artifact's decoded values into the transformers module, which must hold the same but for rounding."""
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" not in name:
            stored = artifact.load(name)
            w = decode(stored) if isinstance(stored, PackedTensor) else stored.float()
            inputs = -1
            if model_type == "gpt_oss" and ".experts." in name:
                w = interleaved(w) if "gate_up" in name else w
                w, inputs = (w.transpose(1, 2), 1) if w.ndim == 3 else (w, -1)
            w = w.reshape(p.shape)
            if isinstance(stored, PackedTensor):
                least, most = ROUNDING[stored.format.name]
                assert least < ((w - p).norm(dim=inputs) / p.norm(dim=inputs)).max() < most, name
            else:
                assert torch.equal(w, p), name
            p.copy_(w)


def check_logits(packed, model: torch.nn.Module) -> None:
    ids = torch.tensor(prompts(40))
    assert worst(packed.forward(ids)[0], model(ids).logits[0]) < FLOAT32_LIMIT


@pytest.mark.parametrize("case", [*FAMILIES, "glm4_moe-plain"])
def test_a_checkpoint_becomes_a_model(case, tmp_path):
    """Every row of every tensor is where its maker's name says, rounded, and the logits are those of rounded values."""
    model_type, options = CASES[case]
    model = make_model(model_type, **options)
    packed = load_packed(convert(tmp_path, model, hub_tensors(model_type, model)), "cpu", torch.float32)
    before = model(torch.tensor(prompts(40))).logits[0]
    give_rounded(model, model_type, packed.artifact)
    check_logits(packed, model)
    assert FLOAT32_LIMIT < worst(model(torch.tensor(prompts(40))).logits[0], before)
    assert not [name for name in packed.artifact.manifest.tensors if re.search(r"experts\.\d", name)]


@pytest.mark.parametrize("case", ["mixtral", "granitemoe", "gpt_oss"])
def test_bf16_gives_the_logits_of_the_checkpoint(case, tmp_path):
    """With nothing to round, transformers' model holds the checkpoint itself."""
    model_type, options = CASES[case]
    model = make_model(model_type, **options)
    tensors = hub_tensors(model_type, model)
    check_logits(load_packed(convert(tmp_path, model, tensors, "bf16"), "cpu", torch.float32), model)


def test_minimax_in_block_fp8_gives_the_logits_of_the_checkpoint(tmp_path):
    """As it is published: float8 with a scale for each 128 × 128. transformers' model holds what these mean."""
    model_type, options = CASES["minimax_m2"]
    model = make_model(model_type, **options)
    tensors = to_fp8(hub_tensors(model_type, model), r"\.w[123]\.weight|_proj\.weight")
    block = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
             "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}  # fmt: skip
    for name, p in model.named_parameters():
        for made, view in _as_made(model_type, name, p):
            if made + "_scale_inv" in tensors:
                view.copy_(tensors[made].float() * spread(tensors[made + "_scale_inv"], (128, 128), view.shape))
    packed = load_packed(convert(tmp_path, model, tensors, "source", quantization_config=block), "cpu", torch.float32)
    assert packed.artifact.manifest.errors == {}
    check_logits(packed, model)


def test_gpt_oss_in_its_own_mxfp4_gives_the_logits_of_the_checkpoint(tmp_path):
    """Interleaved rows of blocks, as OpenAI publishes them. transformers' model holds what these mean."""
    model_type, options = CASES["gpt_oss"]
    model = make_model(model_type, **options | {"intermediate_size": 96})
    tensors = hub_tensors(model_type, model)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        p = dict(model.named_parameters())[name]
        packed = encode(tensors.pop(name).float().transpose(1, 2).contiguous(), FORMATS["mxfp4"], (p.shape[2],)).tensor
        tensors[name + "_blocks"] = packed.data.unflatten(-1, (-1, 16)).clone()
        tensors[name + "_scales"] = packed.scale.clone()
        p.copy_(decode(packed).transpose(1, 2))
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    packed = load_packed(convert(tmp_path, model, tensors, "source", **config), "cpu", torch.float32)
    assert packed.artifact.manifest.errors == {}
    check_logits(packed, model)


def test_the_prediction_layer_of_glm_is_kept(tmp_path):
    model_type, options = CASES["glm4_moe"]
    model = make_model(model_type, **options)
    tensors = hub_tensors(model_type, model)
    hidden = model.config.hidden_size
    extra = {n.replace("layers.2.", "layers.3."): w + 1 for n, w in tensors.items() if "layers.2." in n}
    extra |= {f"model.layers.3.{n}.weight": torch.ones(hidden, dtype=torch.bfloat16) for n in ("enorm", "hnorm", "shared_head.norm")}
    extra["model.layers.3.eh_proj.weight"] = torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)
    extra["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    extra["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    path = convert(tmp_path, model, tensors | extra, "bf16", num_nextn_predict_layers=1)
    packed = load_packed(path, "cpu", torch.float32)
    manifest = packed.artifact.manifest
    assert len(packed.spec.mtp) == 1 and len(packed.spec.layers) == 3
    assert set(manifest.skipped) == {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert "model.layers.3.eh_proj.weight" in manifest.tensors and "model.layers.3.mlp.experts.down_proj" in manifest.tensors
    check_logits(packed, model)
