"""Every maker's layout: what the artifact holds decodes to what the source means, bit for bit, and its bytes are the source's."""

import json

import numpy as np
import pytest
import torch

from tests.checkpoints import INDEX, LAYOUTS, experts, forked, qwen3_config, qwen3_weights, to_layout, tree, values, write_checkpoint
from tests.convert.layouts_oracle import meaning
from tutel_pack.artifact import Artifact
from tutel_pack.convert import layout as cutting
from tutel_pack.convert import pack, pipeline
from tutel_pack.convert.families import Family
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS
from tutel_pack.quant.codec import decode, encode
from tutel_pack.spec import Attention, ClampedSwiglu, DeltaNet, Layer, ModelSpec, Moe, Rope, Router
from tutel_pack.tensors import canonical_tensors

SIZES = {"hidden_size": 192, "num_attention_heads": 18, "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_experts": 3}
"""q_proj has 576 rows, 4½ blocks of 128; K is 96, 192 and 576."""
AT = "model.layers.0.mlp.experts."
GATE_UP, DOWN, Q = AT + "gate_up_proj", AT + "down_proj", "model.layers.0.self_attn.q_proj.weight"
GATE1 = AT + "1.gate_proj"


def config_of(layout: str) -> dict:
    return qwen3_config(quantization_config=LAYOUTS[layout][0], **SIZES)


def written(folder, layout: str, weights: dict, config: dict | None = None) -> str:
    parts = len([name for name in weights if name.startswith(GATE1 + ".")])
    shards = 3 if parts % 3 else 4
    source = write_checkpoint(folder / "model", weights, config or config_of(layout), shards=shards)
    places = json.loads((source / INDEX).read_text())["weight_map"]
    weight, scale, *_ = (file for name, file in places.items() if name.startswith(GATE1 + "."))
    up = next(file for name, file in places.items() if name.startswith(AT + "1.up_proj."))
    assert weight != scale and weight != up  # neither weight and scale nor gate and up are in one file
    return str(source)


def meant_experts(layout: str, weights: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """([E, 2I, H], [E, H, I]) of layer 0."""
    names = [f"{AT}{e}.{kind}_proj" for e in range(3) for kind in ("gate", "up", "down")]
    return experts({name + ".weight": torch.from_numpy(meaning(layout, weights, name)) for name in names}, 0, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_pass_bit_for_bit(tmp_path, monkeypatch, layout):
    weights = to_layout(layout, qwen3_weights(config_of(layout)))
    source = written(tmp_path, layout, weights)
    out = convert_checkpoint(source, tmp_path / "out", fmt="source")
    artifact = Artifact(out)
    for name, wanted in zip((GATE_UP, DOWN), meant_experts(layout, weights)):
        found = artifact.load(name)
        assert found.format.name == layout.split("-")[0].replace("mxfp8", "fp8")
        assert torch.equal(decode(found), wanted)
        assert torch.equal(decode(found, torch.bfloat16), wanted.bfloat16())
    for name in (Q, "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(decode(artifact.load(name)), torch.from_numpy(meaning(layout, weights, name.removesuffix(".weight"))))
    assert artifact.manifest.errors == {}
    unused = {name for name in weights if name.endswith(("input_scale", "input_global_scale", "weight_shape"))}
    assert artifact.manifest.skipped.keys() == unused and all(artifact.manifest.skipped.values())
    # The same where the target is the format that the source has, and however the work is cut.
    fmt = found.format.name
    if fmt != "int4":
        again = convert_checkpoint(source, tmp_path / "again", fmt=fmt, rest=fmt, overrides=(("lm_head", "source"),))
        assert tree(again, "*.safetensors") == tree(out, "*.safetensors")
    monkeypatch.setattr(cutting, "UNIT_ELEMENTS", 1)
    assert tree(convert_checkpoint(source, tmp_path / "cut", fmt="source"), "*.safetensors") == tree(out, "*.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_the_sources(tmp_path, layout):
    weights = to_layout(layout, qwen3_weights(config_of(layout)))
    artifact = Artifact(convert_checkpoint(written(tmp_path, layout, weights), tmp_path / "out", fmt="source"))
    data = weights.get(Q, weights.get(Q + "_packed")).view(torch.uint8)
    found = artifact.load(Q)
    # Of int4 every element is told by its distance from 8 in the source: the top bit of a nibble is flipped.
    assert torch.equal(found.data.view(torch.uint8), data ^ 0x88 if layout == "int4-ct" else data)
    scale = next(w for name, w in weights.items() if name.startswith(Q[:-6]) and name.endswith((".scale", "_scale", "_scale_inv")) and "input" not in name)
    if scale.dtype == torch.bfloat16 and layout != "int4-ct":
        scale = scale.float()
    assert torch.equal(found.scale.flatten().view(torch.uint8), scale.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("layout", ["fp8-channel", "fp8-tensor", "mxfp8", "fp8-block-e8m0", "mxfp4-v4", "nvfp4-ct", "int4-ct"])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "bf16"])
def test_layouts_become_other_formats(tmp_path, layout, fmt):
    """Decoded, and then encoded like any other weights."""
    weights = to_layout(layout, qwen3_weights(config_of(layout)), r"experts.*_proj\.weight")
    artifact = Artifact(convert_checkpoint(written(tmp_path, layout, weights), tmp_path / "out", fmt=fmt, rest="bf16"))
    for name, wanted, segments in zip((GATE_UP, DOWN), meant_experts(layout, weights), ((96, 96), None)):
        found, expected = artifact.load(name), encode(wanted, FORMATS[fmt], segments).tensor
        if layout.split("-")[0] == fmt:
            assert torch.equal(decode(found), wanted) and name not in artifact.manifest.errors
        elif "exact" in artifact.manifest.errors[name]:
            assert torch.equal(decode(found), wanted)
        else:
            assert torch.equal(decode(found), decode(expected))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_mxfp4_is_cast_without_loss_where_it_can_be(tmp_path, fmt):
    """The first expert spans too many powers of two and is encoded anew, the others are exact, and this is told. In fp8 only
    its rows of blocks that do: the first, and of down_proj's 192 rows not the second."""
    layout = "mxfp4-ct"
    weights = to_layout(layout, qwen3_weights(config_of(layout)), r"experts.*_proj\.weight")
    for name, w in weights.items():
        if name.endswith("_scale"):
            w.copy_(100 + w % 14)
            w[0, 0] = 114 if ".experts.0." not in name else 140
    source = written(tmp_path, layout, weights)
    done = forked(tmp_path, source, "--fmt", fmt, "--rest", "bf16", "-o", tmp_path / "out")
    artifact = Artifact(tmp_path / "out")
    for name, wanted, segments in zip((GATE_UP, DOWN), meant_experts(layout, weights), ((96, 96), None)):
        found, encoded = decode(artifact.load(name)), decode(encode(wanted, FORMATS[fmt], segments).tensor)
        assert torch.equal(found[1:], wanted[1:]) and not torch.equal(found[0], wanted[0])
        first = encoded[0].clone()
        if (fmt, name) == ("fp8", DOWN):
            first[128:] = wanted[0, 128:]
        assert torch.equal(found[0], first)
        # To encode anew would lose something, but where an nvfp4 expert's largest is 6 · 2^k, of which e4m3 has the right share.
        assert fmt == "nvfp4" or not torch.equal(encoded[1:], wanted[1:])
        assert artifact.manifest.errors[name]["worst_expert"] == 0 and artifact.manifest.errors[name]["rms"] > 0
    assert done[0] == 0 and "without loss" not in done[1]
    for name, w in weights.items():
        if name.endswith("_scale"):
            w[0, 0] = 114
    source = written(tmp_path / "exact", layout, weights)
    done = forked(tmp_path, source, "--fmt", fmt, "--rest", "bf16", "-o", tmp_path / "out2")
    artifact = Artifact(tmp_path / "out2")
    assert torch.equal(decode(artifact.load(GATE_UP)), meant_experts(layout, weights)[0])
    assert all(error == {"rms": 0.0, "exact": True} for error in artifact.manifest.errors.values())
    assert done[0] == 0 and "Cast from another format without loss: 2 tensors" in done[1]


def test_what_is_left_out_is_said_once_a_reason(tmp_path):
    layout = "nvfp4-modelopt"
    source = written(tmp_path, layout, to_layout(layout, qwen3_weights(config_of(layout))))
    code, out, _ = forked(tmp_path, source, "--fmt", "source", "--dry-run")
    lines = [line for line in out.splitlines() if "leaves out" in line]
    assert code == 0 and len(lines) == 1 and "input_scale and " in lines[0] and "quantized activations" in lines[0]


def test_dialects_mix_in_one_checkpoint(tmp_path):
    """As DeepSeek-V4: MXFP4 experts, block-FP8 beside them, and a head in BF16: each tensor by its own header."""
    config = config_of("mxfp4-v4")
    plain = qwen3_weights(config)
    weights = to_layout("fp8-block-e8m0", to_layout("mxfp4-v4", plain, r"experts.*_proj\.weight"), r"(self_attn|layers\.1\.mlp)\..*_proj\.weight")
    artifact = Artifact(convert_checkpoint(written(tmp_path, "mxfp4-v4", weights), tmp_path / "out", fmt="mxfp4"))
    assert torch.equal(decode(artifact.load(GATE_UP)), meant_experts("mxfp4-v4", weights)[0])
    assert artifact.load(Q).format == FORMATS["fp8"].with_scale((128, 128), torch.uint8)
    assert torch.equal(decode(artifact.load(Q)), torch.from_numpy(meaning("fp8-block-e8m0", weights, Q[:-7])))
    assert artifact.load("lm_head.weight").format.name == "fp8" and artifact.manifest.errors.keys() == {"lm_head.weight"}


def test_gate_and_up_keep_their_own_global_scales(tmp_path):
    weights = to_layout("nvfp4-modelopt", qwen3_weights(config_of("nvfp4-modelopt")))
    for e in range(3):
        weights[f"{AT}{e}.gate_proj.weight_scale_2"] = torch.tensor(1.0)
        weights[f"{AT}{e}.up_proj.weight_scale_2"] = torch.tensor(10.0)
    artifact = Artifact(convert_checkpoint(written(tmp_path, "nvfp4-modelopt", weights), tmp_path / "out", fmt="nvfp4"))
    found = artifact.load(GATE_UP)
    assert found.global_scale.tolist() == [[1.0, 10.0]] * 3
    assert torch.equal(decode(found), meant_experts("nvfp4-modelopt", weights)[0])
    swapped = decode(type(found).from_parts(found.format, found.shape, found.segments, {**found.parts(), "_scale_2": found.global_scale.flip(1)}))
    assert not torch.equal(swapped, decode(found))  # the check sees the difference


def test_nibble_order_and_an_e8m0_byte(tmp_path):
    """Byte 0x21 is 0.5 and then 1.0; scale byte 120 is 2^−7, and not the number 120."""
    weights = to_layout("mxfp4-v4", qwen3_weights(config_of("mxfp4-v4")))
    weights[GATE1 + ".weight"].fill_(0x21)
    weights[GATE1 + ".scale"].view(torch.uint8).fill_(120)
    artifact = Artifact(convert_checkpoint(written(tmp_path, "mxfp4-v4", weights), tmp_path / "out", fmt="source"))
    row = decode(artifact.load(GATE_UP))[1, 0]
    assert row[:2].tolist() == [0.5 * 2**-7, 2**-7]


def test_the_reciprocal_of_compressed_tensors(tmp_path):
    """Their law is element × (block scale / g), ours element × (block scale × m) with the float32 m nearest to 1/g.

    In float32 the two differ by at most 3 · 2^−24, relatively: one rounding each of m, the product and the quotient. Rounded
    to bfloat16 they are equal but where a value lies that close to the middle of two bfloat16 numbers.
    """
    weights = to_layout("nvfp4-ct", qwen3_weights(config_of("nvfp4-ct")))
    artifact = Artifact(convert_checkpoint(written(tmp_path, "nvfp4-ct", weights), tmp_path / "out", fmt="nvfp4"))
    for index, e in ((0, 0), (1, 1), (2, 2)):
        for segment, kind in enumerate(("gate", "up")):
            base = f"{AT}{e}.{kind}_proj"
            g = weights[base + ".weight_global_scale"]
            m = artifact.load(GATE_UP).global_scale[index, segment]
            neighbours = torch.stack([m, torch.nextafter(m, torch.tensor(0.0)), torch.nextafter(m, torch.tensor(9.0))])
            assert int((neighbours.double() - 1 / g.double()).abs().argmin()) == 0
            codes = weights[base + ".weight_packed"].numpy()
            elements = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            elements = elements[torch.from_numpy(np.stack([codes % 16, codes // 16], -1).reshape(96, -1)).long()]
            theirs = elements * (weights[base + ".weight_scale"].float() / g).repeat_interleave(16, 1)
            ours = decode(artifact.load(GATE_UP))[index, 96 * segment : 96 * segment + 96]
            assert ((ours - theirs).abs().double() <= 3 * 2.0**-24 * theirs.abs().double() * (1 + 1e-6)).all()
            assert torch.equal(ours.bfloat16(), theirs.bfloat16())


# What is refused


def change(name, value):
    return lambda w: w.update({name: value})


def without(name):
    return lambda w: w.pop(name)


def spoiled(name, value, item=0):
    def apply(w):
        flat = w[name].view(torch.uint8).view(-1)
        flat[item] = value

    return apply


def set_nan(name):
    return lambda w: w[name].fill_(torch.nan)


E1 = GATE1 + "."


@pytest.mark.parametrize("layout, fault, parts", [
    ("mxfp4-v4", without(E1 + "scale"), [E1 + "weight", "no scale"]),
    ("mxfp4-ct", without(E1 + "weight_scale"), [E1 + "weight_packed", E1 + "weight_scale", "missing"]),
    ("mxfp4-quark", without(E1 + "weight_scale"), [E1 + "weight", E1 + "weight_scale", "missing"]),
    ("nvfp4-ct", without(E1 + "weight_scale"), [E1 + "weight_packed", E1 + "weight_scale", "missing"]),
    ("nvfp4-ct", without(E1 + "weight_global_scale"), [E1 + "weight_global_scale", "missing"]),
    ("nvfp4-modelopt", without(E1 + "weight_scale"), [E1 + "weight_scale", "missing"]),
    ("nvfp4-modelopt", without(E1 + "weight_scale_2"), [E1 + "weight_scale_2", "missing"]),
    ("int4-ct", without(E1 + "weight_scale"), [E1 + "weight_packed", E1 + "weight_scale", "missing"]),
    ("fp8-channel", without(E1 + "weight_scale"), [E1 + "weight", "no scale"]),
    ("mxfp8", without(E1 + "weight_scale_inv"), [E1 + "weight", "no scale"]),
    ("mxfp4-v4", change(E1 + "scale", torch.ones(96, 3).to(torch.float8_e8m0fnu)), [E1 + "scale", "[96, 3]", "[96, 6]"]),
    ("mxfp4-ct", change(E1 + "weight_scale", torch.ones(95, 6, dtype=torch.uint8)), [E1 + "weight_scale", "[95, 6]", "[96, 6]"]),
    ("mxfp4-quark", change(E1 + "weight_scale", torch.ones(96, 6)), [E1 + "weight_scale", "F32", "U8"]),
    ("nvfp4-modelopt", change(E1 + "weight_scale", torch.ones(96, 6).to(torch.float8_e4m3fn)), [E1 + "weight_scale", "[96, 12]"]),
    ("nvfp4-modelopt", change(E1 + "weight_scale_2", torch.ones(2)), [E1 + "weight_scale_2", "[2]"]),
    ("nvfp4-ct", change(E1 + "weight_global_scale", torch.ones(1).bfloat16()), [E1 + "weight_global_scale", "BF16"]),
    ("int4-ct", change(E1 + "weight_scale", torch.ones(96, 6)), [E1 + "weight_scale", "F32"]),
    ("int4-ct", change(E1 + "weight_zero_point", torch.ones(96, 6, dtype=torch.int32)), ["unknown", E1 + "weight_zero_point"]),
    ("int4-ct", change(E1 + "weight_g_idx", torch.ones(192, dtype=torch.int32)), ["unknown", E1 + "weight_g_idx"]),
    ("fp8-channel", change(E1 + "weight_scale", torch.ones(95, 1)), [E1 + "weight_scale", "[95, 1]", "[96, 1]"]),
    ("fp8-tensor", change(E1 + "weight_scale", torch.ones((), dtype=torch.float64)), [E1 + "weight_scale", "F64"]),
    ("mxfp8", change(E1 + "weight_scale_inv", torch.ones(96, 2, dtype=torch.uint8)), [E1 + "weight_scale_inv", "[96, 2]", "[96, 6]"]),
    ("nvfp4-modelopt", change(E1 + "pre_quant_scale", torch.ones(192)), ["unknown", E1 + "pre_quant_scale"]),
    ("mxfp4-ct", change(E1 + "weight", torch.ones(96, 192)), [E1 + "weight", "twice"]),
    ("mxfp4-quark", change(E1 + "weight", torch.zeros(96, 90, dtype=torch.uint8)), [E1 + "weight", "whole blocks of 32"]),
    ("nvfp4-ct", change(E1 + "weight_packed", torch.zeros(96, 90, dtype=torch.uint8)), [E1 + "weight_packed", "whole blocks of 16"]),
    # Bytes that are no numbers
    ("mxfp4-v4", spoiled(E1 + "scale", 255, 7), [GATE_UP, "[1, 1, 32]"]),
    ("mxfp4-ct", spoiled(E1 + "weight_scale", 255, 6 * 95), [GATE_UP, "[1, 95, 0]"]),
    ("mxfp8", spoiled(E1 + "weight_scale_inv", 255), [GATE_UP, "[1, 0, 0]"]),
    ("fp8-block-e8m0", spoiled(E1 + "scale", 255), [GATE_UP, "[1, 0, 0]"]),
    ("nvfp4-modelopt", spoiled(E1 + "weight_scale", 0x7F, 13), [GATE_UP, "[1, 1, 16]"]),
    ("nvfp4-modelopt", set_nan(E1 + "weight_scale_2"), [GATE_UP, "[1, 0, 0]"]),
    ("nvfp4-ct", set_nan(E1 + "weight_global_scale"), [GATE_UP, "[1, 0, 0]"]),
    ("nvfp4-ct", lambda w: w[E1 + "weight_global_scale"].zero_(), [GATE_UP, "[1, 0, 0]"]),
    ("nvfp4-ct", lambda w: w[E1 + "weight_global_scale"].fill_(torch.inf), [GATE_UP, "[1, 0, 0]"]),
    ("int4-ct", set_nan(E1 + "weight_scale"), [GATE_UP, "[1, 0, 0]"]),
    ("fp8-channel", set_nan(E1 + "weight_scale"), [GATE_UP, "[1, 0, 0]"]),
])  # fmt: skip
def test_broken_layouts(tmp_path, layout, fault, parts):
    weights = to_layout(layout, qwen3_weights(config_of(layout)))
    fault(weights)
    source = write_checkpoint(tmp_path / "model", weights, config_of(layout))
    for fmt in ("source", "mxfp4" if not layout.startswith("mxfp4") else "nvfp4"):
        with pytest.raises(InputError) as caught:
            convert_checkpoint(str(source), tmp_path / "out", fmt=fmt)
        text = str(caught.value)
        assert "\n" not in text and not (tmp_path / "out").exists()
        # A number that is none may show first in another place once it is decoded.
        assert [p for p in parts if p not in text and not (fmt != "source" and p.startswith("["))] == [], text


@pytest.mark.parametrize("changes, part", [
    ({"num_bits": 8}, "num_bits 8"), ({"group_size": 128}, "group_size 128"), ({"symmetric": False}, "symmetric False"),
    ({"strategy": "channel"}, "strategy 'channel'"), ({"actorder": "group"}, "actorder 'group'"), ({"type": "float"}, "describes none"),
])  # fmt: skip
def test_other_integers_are_refused(tmp_path, changes, part):
    config = json.loads(json.dumps(config_of("int4-ct")))
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    source = write_checkpoint(tmp_path / "model", to_layout("int4-ct", qwen3_weights(config)), config)
    with pytest.raises(InputError, match=part):
        convert_checkpoint(str(source), tmp_path / "out", fmt="source")


def test_the_quantization_of_a_text_model_counts(tmp_path):
    """Kimi-K2.5 has it in text_config."""
    for found, part in (({"quant_method": "awq"}, "AWQ"), (config_of("int4-ct")["quantization_config"], None)):
        config = qwen3_config(**SIZES) | {"text_config": {"quantization_config": found}}
        source = str(write_checkpoint(tmp_path / str(part), to_layout("int4-ct", qwen3_weights(config)), config))
        if part is None:
            assert pipeline.plan(source, pipeline.Recipe("source")).entries[GATE_UP].format == FORMATS["int4"]
        else:
            with pytest.raises(InputError, match=part):
                pipeline.plan(source, pipeline.Recipe("source"))


def test_cut_nvfp4_experts_are_read_once(tmp_path, monkeypatch):
    """What passes through needs no largest magnitude, which would take a pass of its own."""
    weights = to_layout("nvfp4-modelopt", qwen3_weights(config_of("nvfp4-modelopt")))
    job = pipeline.plan(written(tmp_path, "nvfp4-modelopt", weights), pipeline.Recipe("source"))
    monkeypatch.setattr(cutting, "UNIT_ELEMENTS", 1)
    monkeypatch.setattr(pack, "read_unit", lambda *args: pytest.fail("a pass too many"))
    pipeline.run(job, tmp_path / "out")


def test_rotated_weights_are_refused(tmp_path):
    config = json.loads(json.dumps(config_of("nvfp4-ct")))
    config["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}
    source = write_checkpoint(tmp_path / "model", to_layout("nvfp4-ct", qwen3_weights(config)), config)
    with pytest.raises(InputError, match="transform_config"):
        pipeline.plan(str(source), pipeline.Recipe("source"))


# What is kept


def test_kept_tensors_stay_packed_in_the_format_of_the_source(tmp_path):
    """A router in block-FP8 among BF16 weights stays in block-FP8, whatever the target."""
    name = "model.layers.0.mlp.gate.weight"
    weights = to_layout("fp8-block-scale_inv", qwen3_weights(config_of("fp8-block-scale_inv")), r"mlp\.gate\.weight")
    source = write_checkpoint(tmp_path / "model", weights, config_of("fp8-block-scale_inv"))
    artifact = Artifact(convert_checkpoint(str(source), tmp_path / "out", fmt="mxfp4"))
    found = artifact.load(name)
    assert found.format == FORMATS["fp8"] and torch.equal(found.data.view(torch.uint8), weights[name].view(torch.uint8))
    assert torch.equal(decode(found), torch.from_numpy(meaning("fp8-block-scale_inv", weights, name[:-7])))


def spec_of(layer: Layer, **more) -> ModelSpec:
    return ModelSpec("other", 64, 50, 128, 1e-6, True, (layer,), **more)


@pytest.fixture
def family(monkeypatch):
    """Convert by a family that is defined inside of a test."""

    def use(spec: ModelSpec, **options) -> Family:
        found = Family(("other",), lambda config: spec, **options)
        monkeypatch.setattr(pipeline, "find_family", lambda config: found)
        return found

    return use


def test_convolutions_and_correction_biases_are_kept_as_they_are(tmp_path, family):
    """[C, 1, k] is no tensor of experts; 238 biases that BF16 could not tell apart stay distinct in F32."""
    moe = Moe(238, 2, 32, Router("sigmoid", correction=True))
    spec = spec_of(Layer(DeltaNet(2, 4, 16, 16, 4, grouped=False), moe))
    family(spec)
    weights = {name: values(name, t.shape).bfloat16() for name, t in canonical_tensors(spec).items()}
    bias, conv = "model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.linear_attn.conv1d.weight"
    weights[bias] = torch.linspace(6.817, 7.063, 238)
    artifact = Artifact(convert_checkpoint(str(write_checkpoint(tmp_path / "m", weights, {"model_type": "other"})), tmp_path / "out"))
    assert artifact.load(bias).dtype == torch.float32 and len(artifact.load(bias).unique()) == 238
    assert torch.equal(artifact.load(bias), weights[bias]) and len(weights[bias].bfloat16().unique()) < 20
    assert torch.equal(artifact.load(conv), weights[conv]) and artifact.load(conv).shape == (128, 1, 4)
    weights[conv][100, 0, 3] = torch.nan
    source = write_checkpoint(tmp_path / "n", weights, {"model_type": "other"})
    with pytest.raises(InputError, match=r"conv1d.weight has a weight that is NaN or infinite at \[100, 0, 3\]"):
        convert_checkpoint(str(source), tmp_path / "bad")


# gpt-oss: interleaved rows, MXFP4 in blocks, BF16 transposed

OSS = spec_of(
    Layer(
        Attention(4, 2, 16, Rope(1e4, 16), bias="qkvo", sinks=True),
        Moe(3, 2, 96, Router("softmax_chosen", bias=True), activation=ClampedSwiglu(7.0, 1.702, 1.0), bias=True),
    ),
    names=(("router", "mlp.router"),),
)
OSS_FAMILY = {"interleaved": (r".*\.experts\.gate_up_proj(_bias)?",), "transposed": (r".*\.experts\.(gate_up|down)_proj",)}


def oss_weights(packed: bool) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(checkpoint, gate_up [3, 192, 64] and down [3, 64, 96] as they are meant, gate_up bias [3, 192])."""
    weights = {name: values(name, t.shape).bfloat16() for name, t in canonical_tensors(OSS).items()}
    if packed:
        wanted = {}
        for name, (e, n, k) in ((GATE_UP, (3, 192, 64)), (DOWN, (3, 64, 96))):
            del weights[name]
            found = to_layout("mxfp4-ct", {f"{name}.{i}_proj.weight": torch.empty(n, k) for i in range(e)})
            blocks = torch.stack([found[f"{name}.{i}_proj.weight_packed"] for i in range(e)])
            weights[name + "_blocks"] = blocks.view(e, n, k // 32, 16)
            weights[name + "_scales"] = torch.stack([found[f"{name}.{i}_proj.weight_scale"] for i in range(e)])
            wanted[name] = torch.stack([torch.from_numpy(meaning("mxfp4-ct", found, f"{name}.{i}_proj")) for i in range(e)])
    else:
        wanted = {name: weights[name].float() for name in (GATE_UP, DOWN)}
        weights |= {name: wanted[name].mT.bfloat16() for name in wanted}
    bias = weights[GATE_UP + "_bias"]
    rows = [torch.cat([w[:, 0::2], w[:, 1::2]], dim=1) for w in (wanted[GATE_UP], bias)]
    return weights, rows[0], wanted[DOWN], rows[1]


@pytest.mark.parametrize("unit", [None, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "bf16"])
def test_gpt_oss(tmp_path, monkeypatch, family, packed, unit):
    family(OSS, **OSS_FAMILY)
    if unit:
        monkeypatch.setattr(cutting, "UNIT_ELEMENTS", unit)
    weights, gate_up, down, bias = oss_weights(packed)
    quantization = {"quantization_config": {"quant_method": "mxfp4"}} if packed else {}
    source = str(write_checkpoint(tmp_path / "m", weights, {"model_type": "other", **quantization}))
    artifact = Artifact(convert_checkpoint(source, tmp_path / "source", fmt="source"))
    assert artifact.load(GATE_UP).format.name == ("mxfp4" if packed else "bf16") and artifact.load(GATE_UP).segments == (96, 96)
    assert torch.equal(decode(artifact.load(GATE_UP)), gate_up) and torch.equal(decode(artifact.load(DOWN)), down)
    assert torch.equal(artifact.load(GATE_UP + "_bias"), bias)
    assert torch.equal(artifact.load(DOWN + "_bias"), weights[DOWN + "_bias"])
    fmt = "bf16" if packed else "mxfp4"
    other = Artifact(convert_checkpoint(source, tmp_path / "other", fmt=fmt, rest="bf16"))
    assert torch.equal(decode(other.load(GATE_UP)), decode(encode(gate_up, FORMATS[fmt], (96, 96)).tensor))
    assert torch.equal(decode(other.load(DOWN)), decode(encode(down, FORMATS[fmt]).tensor))


def test_a_sentinel_in_every_interleaved_row(tmp_path, family):
    """Row 2j is gate row j and row 2j + 1 up row j, in weights and biases, on every expert."""
    family(OSS, **OSS_FAMILY)
    weights, *_ = oss_weights(packed=False)
    rows = torch.arange(192.0).expand(3, 192) + 200 * torch.arange(3.0)[:, None]
    weights[GATE_UP] = rows[:, None, :].expand(3, 64, 192).bfloat16().contiguous()
    weights[GATE_UP + "_bias"] = rows.clone().bfloat16()
    source = str(write_checkpoint(tmp_path / "m", weights, {"model_type": "other"}))
    artifact = Artifact(convert_checkpoint(source, tmp_path / "out", fmt="source"))
    order = [*range(0, 192, 2), *range(1, 192, 2)]
    assert torch.equal(artifact.load(GATE_UP).data, rows[:, order, None].expand(3, 192, 64).bfloat16())
    assert torch.equal(artifact.load(GATE_UP + "_bias"), rows[:, order].bfloat16())


def test_interleaved_and_transposed_experts_are_read_once(tmp_path, monkeypatch, family):
    family(OSS, **OSS_FAMILY)
    for packed in (True, False):
        weights, *_ = oss_weights(packed)
        source = str(write_checkpoint(tmp_path / str(packed), weights, {"model_type": "other"}))
        job = pipeline.plan(source, pipeline.Recipe("source"))
        read = []
        monkeypatch.setattr(job.source, "_read", lambda file, a, b, read=read, inner=job.source._read: read.append(b - a) or inner(file, a, b))
        pipeline.run(job, tmp_path / f"out-{packed}")
        assert sum(read) == job.bytes_read + job.source.files["config.json"] + job.source.files["tokenizer.json"]


def test_biases_of_experts_one_by_one(tmp_path, family):
    """Biases that the source has per expert and projection, and gate and up in one matrix per expert."""
    renames = {r"(.+\.experts)\.gate_up_proj": (r"\1.{expert}.w13.weight",), r"(.+\.experts)\.down_proj": (r"\1.{expert}.w2.weight",),
               r"(.+\.experts)\.gate_up_proj_bias": (r"\1.{expert}.w1.bias", r"\1.{expert}.w3.bias"),
               r"(.+\.experts)\.down_proj_bias": (r"\1.{expert}.w2.bias",)}  # fmt: skip
    family(OSS, renames=renames)
    weights = {name: values(name, t.shape).bfloat16() for name, t in canonical_tensors(OSS).items()}
    wanted = {name: weights.pop(name) for name in (GATE_UP, DOWN, GATE_UP + "_bias", DOWN + "_bias")}
    for e in range(3):
        weights |= {f"{AT}{e}.w13.weight": wanted[GATE_UP][e], f"{AT}{e}.w2.weight": wanted[DOWN][e],
                    f"{AT}{e}.w1.bias": wanted[GATE_UP + "_bias"][e, :96], f"{AT}{e}.w3.bias": wanted[GATE_UP + "_bias"][e, 96:],
                    f"{AT}{e}.w2.bias": wanted[DOWN + "_bias"][e]}  # fmt: skip
    artifact = Artifact(convert_checkpoint(str(write_checkpoint(tmp_path / "m", weights, {"model_type": "other"})), tmp_path / "out", fmt="bf16"))
    for name, w in wanted.items():
        found = artifact.load(name)
        assert torch.equal(found if name.endswith("bias") else found.data, w), name


def test_all_experts_under_another_name(tmp_path, family):
    """One tensor for all experts that is only named otherwise, or one for gate and one for up."""
    for names in (("all_in",), ("all_gate", "all_up")):
        family(OSS, renames={r"(.+)\.experts\.gate_up_proj": tuple(rf"\1.{name}" for name in names)})
        weights = {name: values(name, t.shape).bfloat16() for name, t in canonical_tensors(OSS).items()}
        wanted = weights.pop(GATE_UP)
        weights |= {f"model.layers.0.mlp.{n}": part.contiguous() for n, part in zip(names, wanted.chunk(len(names), dim=1))}
        folder = tmp_path / names[0]
        artifact = Artifact(convert_checkpoint(str(write_checkpoint(folder / "m", weights, {"model_type": "other"})), folder / "out", fmt="bf16"))
        assert torch.equal(artifact.load(GATE_UP).data, wanted)


@pytest.mark.parametrize("fault, part", [
    (without(GATE_UP + "_scales"), GATE_UP + "_scales is missing"),
    (without(GATE_UP + "_blocks"), GATE_UP),
    (lambda w: w.update({GATE_UP + "_scales": w[GATE_UP + "_scales"][:, :, :1].contiguous()}), r"\[3, 192, 1\]"),
    (lambda w: w.update({GATE_UP + "_blocks": w[GATE_UP + "_blocks"].view(3, 192, 4, 8)}), "blocks of 16 bytes"),
    (lambda w: w[DOWN + "_scales"].view(-1)[-1:].fill_(255), r"down_proj has a weight that is NaN or infinite at \[2, 63, 64\]"),
])  # fmt: skip
def test_broken_gpt_oss(tmp_path, family, fault, part):
    family(OSS, **OSS_FAMILY)
    weights, *_ = oss_weights(packed=True)
    fault(weights)
    source = write_checkpoint(tmp_path / "m", weights, {"model_type": "other"})
    with pytest.raises(InputError, match=part):
        convert_checkpoint(str(source), tmp_path / "out", fmt="mxfp4")


def test_rows_in_tall_blocks_cannot_be_interleaved(tmp_path, family):
    config = config_of("fp8-block-scale_inv") | {"model_type": "other"}
    spec = spec_of(Layer(Attention(4, 2, 16, Rope(1e4, 16)), Moe(2, 1, 64)))
    family(spec, renames={r"(.+\.experts)\.gate_up_proj": (r"\1.{expert}.w13_proj.weight",)}, interleaved=(r".*gate_up_proj",))
    weights = {name: values(name, t.shape).bfloat16() for name, t in canonical_tensors(spec).items()}
    del weights[GATE_UP]
    weights |= to_layout("fp8-block-scale_inv", {f"{AT}{e}.w13_proj.weight": torch.empty(128, 64) for e in range(2)})
    with pytest.raises(InputError, match="interleaves rows that share block scales"):
        pipeline.plan(str(write_checkpoint(tmp_path / "m", weights, config)), pipeline.Recipe("source"))


def test_ignore_lists_decide_nothing(tmp_path):
    """Entries that match nothing, or too much, change nothing: each tensor's header says what it is."""
    layout = "mxfp4-ct"
    weights = to_layout(layout, qwen3_weights(config_of(layout)))
    config = config_of(layout)
    outs = []
    for i, ignore in enumerate(([], ["re:.*gate.*", "lm_head"], ["re:.*experts.*"])):
        quantization = config["quantization_config"] | {"ignore": ignore}
        source = write_checkpoint(tmp_path / f"m{i}", weights, config | {"quantization_config": quantization})
        outs.append(tree(convert_checkpoint(str(source), tmp_path / f"o{i}", fmt="source"), "*.safetensors"))
    assert outs[0] == outs[1] == outs[2]
