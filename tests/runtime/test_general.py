"""The general path against transformers' own modules, which hold the same decoded weights."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.checkpoints import to_layout, write_checkpoint
from tests.runtime.general_models import MODELS, hold_decoded, make_model, spelled, takes_text, write
from tests.runtime.test_decoder import run, worst
from tutel_pack.artifact import Artifact
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cli import main
from tutel_pack.runtime.general import PackedExperts, PackedLinear
from tutel_pack.runtime.loader import load_packed

FLOAT32_LIMIT = 1e-4
GREEDY = 24
CASES = [(m, "mxfp4") for m in MODELS] + [("dots1", "fp8"), ("nemotron_h", "fp8"), ("jamba", "nvfp4")]


class Case:
    """An artifact, ours in float32, and transformers' model with the values that the artifact decodes to."""

    def __init__(self, model_type: str, fmt: str, folder: Path):
        theirs = make_model(model_type)
        self.artifact = convert_checkpoint(write(folder / "source", model_type, theirs), folder / "packed", fmt=fmt)
        self.theirs = takes_text(hold_decoded(theirs, self.artifact))
        self.ours = load_packed(self.artifact, device="cpu", dtype=torch.float32)

    def greedy(self, prompt: list[int]) -> list[int]:
        options = {"max_new_tokens": GREEDY, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return self.theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(model_type: str, fmt: str = "mxfp4") -> Case:
        if (model_type, fmt) not in made:
            made[model_type, fmt] = Case(model_type, fmt, tmp_path_factory.mktemp(model_type))
        return made[model_type, fmt]

    return case


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 211, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("model_type,fmt", CASES)
def test_logits_agree_at_every_position(cases, model_type, fmt):
    case = cases(model_type, fmt)
    ids = torch.tensor(prompts(40, 40))
    logits = case.ours.forward(ids)
    assert logits.dtype == torch.float32 and worst(logits, case.theirs(ids).logits) < FLOAT32_LIMIT


@pytest.mark.parametrize("model_type,fmt", CASES)
def test_greedy_tokens_through_the_engine_are_those_of_transformers(cases, model_type, fmt):
    case = cases(model_type, fmt)
    start = prompts(12, 3, 1, 33)
    expected = [case.greedy(ids) for ids in start]
    got = [result.tokens for result in case.ours.generate(start, max_new_tokens=GREEDY, temperature=0)]
    # Ours ends where the model says so.
    assert all(ours == theirs[: len(ours)] and (len(ours) == GREEDY or ours[-1] == 2) for ours, theirs in zip(got, expected))
    assert len({tuple(ids) for ids in expected}) == len(start)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_batch_is_its_sequences_alone(cases, model_type):
    decoder = cases(model_type).ours.decoder
    new = prompts(12, 3, 1, 40)
    for alone, together in zip(([run(decoder, [ids])[0] for ids in new]), run(decoder, new)):
        assert torch.equal(alone, together)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("model_type", MODELS)
def test_chunked_prefill_is_prefill(cases, model_type, chunk):
    """Modules with states take several tokens only at the start: behind it they are given one at a time."""
    decoder = cases(model_type).ours.decoder
    new = prompts(20, 5)
    for once, chunked in zip(run(decoder, new), run(decoder, new, chunk)):
        assert worst(chunked, once.double()) < FLOAT32_LIMIT


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "llama4", "minimax_m3_vl"])
def test_of_a_model_that_sees_the_text_part_is_converted(cases, model_type):
    manifest = Artifact(cases(model_type).artifact).manifest
    seeing = [name for name in spelled(model_type, make_model(model_type)) if "vis" in name or "projector" in name or "patch" in name]
    assert set(manifest.skipped) == set(seeing) and seeing
    assert set(manifest.skipped.values()) == {"of what the model sees or hears: only its text part is converted"}
    assert not any("vis" in name for name in manifest.tensors)
    files = {entry.file for name, entry in manifest.tensors.items() if ".layers.1." in name}
    assert files == {"layers-00001.safetensors"}


def test_experts_that_are_not_transposed_are_taken_too(cases, tmp_path):
    """transformers saves Qwen3-VL-MoE's experts as its module has them; the maker's checkpoints have them transposed."""
    model = make_model("qwen3_vl_moe")
    transposed = spelled("qwen3_vl_moe", model)
    weights = {n: w.transpose(1, 2).contiguous() if ".experts." in n else w for n, w in transposed.items()}
    source = write_checkpoint(tmp_path / "source", weights, {**model.config.to_dict(), "model_type": "qwen3_vl_moe"})
    packed = Artifact(convert_checkpoint(source, tmp_path / "packed", fmt="mxfp4"))
    expected = Artifact(cases("qwen3_vl_moe").artifact)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert all(torch.equal(a, b) for a, b in zip(packed.load(name).parts().values(), expected.load(name).parts().values()) if a is not None)


def test_parts_of_other_widths_than_the_whole_are_refused(tmp_path):
    model = make_model("kimi_linear")
    weights = spelled("kimi_linear", model)
    name = "model.layers.0.self_attn.k_conv1d.weight"
    weights[name] = weights[name][1:].contiguous()
    source = write_checkpoint(tmp_path / "source", weights, {**model.config.to_dict(), "model_type": "kimi_linear"})
    with pytest.raises(InputError, match=r"conv1d\.weight has shape .* where config.json implies"):
        convert_checkpoint(source, tmp_path / "packed")


def test_a_block_that_is_taken_again_starts_anew(cases):
    decoder = cases("jamba").ours.decoder
    first, second = prompts(9, 9)
    expected, = run(decoder, [second])
    cache = decoder.new_cache(1, 16)
    for ids in (first, second):
        table = cache.allocate(1)
        logits = decoder.forward(Batch.build([ids], [0], [table], all_rows=True), cache)
        cache.free(table)
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="do not follow the 0 that were run"):
        decoder.forward(Batch.build([ids], [9], [cache.allocate(1)]), cache)


def test_rows_and_hidden(cases):
    case = cases("dots1")
    decoder, new = case.ours.decoder, prompts(6, 4)
    cache = decoder.new_cache(2)
    tables = [cache.allocate(1), cache.allocate(1)]
    every, hidden = decoder.forward(Batch.build(new, [0, 0], tables, all_rows=True), cache, hidden=True)
    last = decoder.forward(Batch.build(new, [0, 0], tables), cache)
    assert torch.allclose(last, every[[5, 9]], atol=1e-5)
    expected = case.theirs.model(torch.tensor(new[:1])).last_hidden_state[0]
    assert hidden.shape == (10, 64) and torch.allclose(hidden[:6], expected, atol=1e-4)


BROKEN = {
    "an expert is dead": lambda w: (w.data[2].zero_(), w.scale[2].fill_(0)),
    "two experts are swapped": lambda w: w.data.copy_(w.data[[1, 0, *range(2, len(w.data))]]),
    "nibbles are swapped": lambda w: w.data.copy_((w.data >> 4) | (w.data << 4)),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("model_type", ["dots1", "nemotron_h"])
def test_the_limit_is_tight(cases, model_type, broken):
    """Both ways in which experts are computed are seen to matter: swiglu by ops.moe, others one by one."""
    case = cases(model_type)
    model = load_packed(case.artifact, device="cpu", dtype=torch.float32)
    found = next(m for m in model.decoder._model.modules() if isinstance(m, PackedExperts))
    assert found._swiglu == (model_type == "dots1")
    found._down = found._down.from_parts(
        found._down.format, found._down.shape, found._down.segments, {k: p.clone() for k, p in found._down.parts().items() if p is not None}
    )
    BROKEN[broken](found._down)
    ids = torch.tensor(prompts(40))
    assert worst(model.forward(ids), case.theirs(ids).logits) > 10 * FLOAT32_LIMIT


@pytest.mark.parametrize("model_type", MODELS)
def test_weights_stay_packed_in_the_mapped_file(cases, model_type):
    model = cases(model_type).ours.decoder._model
    linears = [m for m in model.modules() if isinstance(m, PackedLinear)]
    experts = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert experts and all(isinstance(w, PackedTensor) for m in experts for w in (m._up, m._down))
    # Routers that are linear layers, and a tied head, stay as they are in the source.
    plain = [m for m in linears if not isinstance(m._packed, PackedTensor)]
    assert len(linears) > 3 and all(m.out_features in (6, 211) for m in plain)
    maps = [line.split()[0].split("-") for line in open("/proc/self/maps") if ".safetensors" in line]
    mapped = [range(int(low, 16), int(high, 16)) for low, high in maps]
    parts = [p for m in experts for w in (m._up, m._down) for p in w.parts().values() if p is not None]
    assert all(any(p.data_ptr() in m for m in mapped) for p in parts)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("model_type", ["dots1", "nemotron_h", "jamba"])
def test_bfloat16_is_as_exact_as_that_of_transformers(cases, model_type):
    """By the median position, since a rounding that tips a router's choice makes an error of any size in either."""
    case = cases(model_type)
    ids = torch.tensor(prompts(40, 40))
    theirs = hold_decoded(make_model(model_type), case.artifact)
    exact = hold_decoded(make_model(model_type), case.artifact).double()(ids).logits
    half = theirs.bfloat16()
    ours = load_packed(case.artifact, device="cpu", dtype=torch.bfloat16).forward(ids)
    errors = [((x.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).median() for x in (ours, half(ids).logits)]
    assert errors[0] <= 1.5 * errors[1]


def test_frequencies_that_grow_with_a_sequence_do_not_concern_the_next(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = make_model("dots1", rope_parameters=rope, max_position_embeddings=16)
    config = {**model.config.to_dict(), "model_type": "dots1", "max_position_embeddings": 16}
    write(tmp_path / "source", "dots1", model)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    decoder = load_packed(convert_checkpoint(tmp_path / "source", tmp_path / "packed"), device="cpu", dtype=torch.float32).decoder
    long, short = prompts(60, 30)
    expected, = run(decoder, [short])
    assert torch.equal(run(decoder, [long, short])[1], expected)
    assert torch.equal(run(decoder, [short])[0], expected)


def test_the_path_is_said(cases, caplog):
    case = cases("dots1")
    with caplog.at_level(logging.INFO, "tutel_pack"):
        assert load_packed(case.artifact, device="cpu").path == "general"
    assert "by the general path" in caplog.text


@pytest.mark.parametrize("quiet", [False, True])
def test_the_command_says_that_it_is_slower(cases, tmp_path, quiet):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    artifact = shutil.copytree(cases("dots1").artifact, tmp_path / "copy")
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(artifact)
    result = CliRunner().invoke(main, ["generate", str(artifact), "w5 w6", "-n", "3", *["-q"] * quiet])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() and ("through its transformers module, which is slower" in result.stderr) is not quiet


def test_transformers_modules_are_imported_only_on_the_general_path():
    script = "import sys, tutel_pack.runtime.loader, tutel_pack.runtime.general; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("config", ["", "[]", "{"], ids=["empty", "no object", "no JSON"])
def test_a_damaged_config_is_named(cases, tmp_path, config):
    artifact = shutil.copytree(cases("dots1").artifact, tmp_path / "copy")
    manifest = json.loads((artifact / "packed.json").read_text())
    manifest["files"]["config.json"]["size"] = len(config)
    (artifact / "packed.json").write_text(json.dumps(manifest))
    (artifact / "config.json").write_text(config)
    with pytest.raises(InputError, match="config.json in .*convert again"):
        load_packed(artifact, device="cpu")


def test_a_module_of_another_shape_is_named(cases, tmp_path):
    artifact = shutil.copytree(cases("dots1").artifact, tmp_path / "copy")
    text = (artifact / "config.json").read_text().replace('"moe_intermediate_size": 40', '"moe_intermediate_size": 48')
    (artifact / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"experts\.gate_up_proj has shape \(6, 80, 64\) where .* \(6, 96, 64\): convert again"):
        load_packed(artifact, device="cpu")


def test_a_buffer_that_nothing_computes_is_refused(cases, monkeypatch):
    """It would be whatever the memory held."""
    monkeypatch.setattr(type(cases("dots1").theirs), "_init_weights", lambda self, module: None)
    with pytest.raises(InputError, match=r"rotary_emb\.inv_freq follows from nothing that is stored"):
        load_packed(cases("dots1").artifact, device="cpu")


@pytest.mark.parametrize("fmt", ["source", "mxfp4"])
def test_deepseek_v4_as_its_maker_packs_it(tmp_path, fmt):
    """Experts in FP4 and the rest of the matrices in block-FP8, both with e8m0 scales."""
    source = write(tmp_path / "bf16", "deepseek_v4", make_model("deepseek_v4"))
    weights = {name: w for file in source.glob("*.safetensors") for name, w in load_file(file).items()}
    weights = to_layout("mxfp4-v4", weights, r"ffn\.experts\.\d+\.w\d\.weight")
    weights = to_layout("fp8-block-e8m0", weights, r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.shared_experts\.w\d)\.weight")
    assert {torch.int8, torch.float8_e8m0fnu, torch.float8_e4m3fn} <= {w.dtype for w in weights.values()}
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "expert_dtype": "fp4"}
    out = convert_checkpoint(str(write_checkpoint(tmp_path / "fp4", weights, config)), tmp_path / "out", fmt=fmt)
    experts = [e for name, e in Artifact(out).manifest.tensors.items() if ".experts." in name]
    assert {e.format.name for e in experts} == {"mxfp4"} and not any(".experts." in n for n in Artifact(out).manifest.errors)
    theirs, ids = hold_decoded(make_model("deepseek_v4"), out), torch.tensor(prompts(30, 30))
    logits, expected = load_packed(out, device="cpu", dtype=torch.float32).forward(ids), theirs(ids).logits
    assert ((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max() < FLOAT32_LIMIT
