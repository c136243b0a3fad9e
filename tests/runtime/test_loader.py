"""From an artifact on disk to logits: what is mapped, what it takes, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.kernels import interpreted
from tests.runtime.models import CONFIG, Pair
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.runtime import loader
from tutel_pack.runtime.loader import load_packed


@pytest.fixture(scope="module")
def pair() -> Pair:
    pair = Pair("nvfp4")
    # As the artifact has them.
    for w in pair.weights.values():
        if isinstance(w, torch.Tensor):
            w.copy_(w.bfloat16())
    return pair


@pytest.fixture(scope="module")
def artifact(pair, tmp_path_factory):
    return pair.write_artifact(tmp_path_factory.mktemp("artifact"))


@pytest.fixture(scope="module")
def model(artifact):
    return load_packed(artifact, device="cpu", dtype=torch.float32)


IDS = torch.randint(CONFIG["vocab_size"], (3, 23), generator=torch.Generator().manual_seed(4))


def test_forward_gives_the_logits_of_transformers(pair, model):
    logits = model.forward(IDS)
    expected = pair.theirs(IDS).logits
    assert logits.dtype == torch.float32 and logits.shape == (3, 23, CONFIG["vocab_size"])
    assert ((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max() < 1e-4


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_forward_in_steps_is_forward_at_once(model, monkeypatch, tokens):
    at_once = model.forward(IDS)
    monkeypatch.setattr(loader, "STEP_TOKENS", tokens)
    assert torch.allclose(model.forward(IDS), at_once, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_forward_of_nothing(model, shape):
    assert model.forward(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, CONFIG["vocab_size"])


def test_what_a_model_says_of_itself(model, artifact):
    assert model.spec == model.artifact.spec and model.artifact.path == artifact
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert load_packed(artifact, device="cpu").dtype == torch.bfloat16
    assert load_packed(str(artifact)).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_weights_on_a_cpu_stay_in_the_mapped_file(artifact, monkeypatch):
    held = []
    taken = loader.Artifact.load
    monkeypatch.setattr(loader.Artifact, "load", lambda self, name: held.append(taken(self, name)) or held[-1])
    to = PackedTensor.to
    monkeypatch.setattr(PackedTensor, "to", lambda self, device: held.append(to(self, device)) or held[-1])
    model = load_packed(artifact, device="cpu")
    model.forward(IDS)
    maps = [line.split()[0].split("-") for line in open("/proc/self/maps") if str(artifact) in line]
    mapped = [range(int(low, 16), int(high, 16)) for low, high in maps]
    parts = [p for w in held for p in (w.parts().values() if isinstance(w, PackedTensor) else [w]) if p is not None]
    assert len(parts) > 40 and all(any(p.data_ptr() in m for m in mapped) for p in parts)


def test_loading_imports_no_transformers(artifact):
    script = f"""
import sys, torch
from tutel_pack import load_packed
load_packed({str(artifact)!r}, device="cpu").forward(torch.tensor([[1, 2, 3]]))
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_tokenizer_is_none(model):
    assert model.tokenizer is None


def test_a_tokenizer_is_loaded(pair, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    pair.theirs.config.save_pretrained(tmp_path)
    assert load_packed(pair.write_artifact(tmp_path), device="cpu").tokenizer("b a c")["input_ids"] == [1, 0, 2]


def test_a_tokenizer_that_needs_its_author_s_code_is_refused(pair, tmp_path):
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('code of the artifact was run')")
    with pytest.raises(InputError, match="tokenizer in .* cannot be loaded"):
        load_packed(pair.write_artifact(tmp_path), device="cpu").tokenizer


@pytest.mark.parametrize(
    "ids,message",
    [
        (torch.zeros(1, 3, dtype=torch.int32), r"not torch.int32 \[1, 3\]"),
        (torch.zeros(3, dtype=torch.int64), r"not torch.int64 \[3\]"),
        ([[1, 2]], "not list"),
        (torch.tensor([[1, 211]]), "Token id 211 is not in the vocabulary of 211"),
        (torch.tensor([[-1, 2]]), "Token id -1 is not"),
        (torch.zeros(1, 513, dtype=torch.int64), "513 tokens are more than the model's context of 512"),
    ],
    ids=["dtype", "shape", "no tensor", "id too high", "negative id", "too long"],
)
def test_wrong_input_is_named(model, ids, message):
    with pytest.raises(InputError, match=message):
        model.forward(ids)


def test_the_whole_context_may_be_used(model):
    assert model.forward(torch.ones(1, 512, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"dtype": torch.float64}, InputError, "Cannot compute in torch.float64: choose one of torch.bfloat16"),
        ({"backend": "metal"}, InputError, "Unknown backend 'metal'"),
        ({"device": "gpu7"}, InputError, "There is no device 'gpu7'"),
        ({"device": "meta"}, InputError, "holds no values"),
        ({"device": "cuda:99"}, ResourceError, "'cuda:99' cannot be used here"),
    ],
    ids=["dtype", "backend", "no device", "no values", "missing device"],
)
def test_wrong_options_are_named(artifact, options, error, message):
    with pytest.raises(error, match=message):
        load_packed(artifact, **{"device": "cpu", **options})


def test_a_folder_without_an_artifact_is_named(tmp_path):
    with pytest.raises(InputError, match="is not a packed artifact"):
        load_packed(tmp_path)


def test_quantized_activations_need_experts_and_a_device_for_them(artifact):
    with pytest.raises(InputError, match=r"in mxfp8 are for experts in mxfp4, and those of .* are in nvfp4"):
        load_packed(artifact, device="cpu", act="mxfp8")
    with pytest.raises(InputError, match="to 'nvfp4': the backend '(cpu|torch)' has no kernels for it"):
        load_packed(artifact, device="cpu", act="nvfp4")
    with pytest.raises(InputError, match="cannot be quantized to 'int4': choose one of fp8, mxfp8, nvfp4, int8"):
        load_packed(artifact, device="cpu", act="int4")


def test_activations_in_int8_need_experts_in_four_bits(tmp_path):
    with pytest.raises(InputError, match=r"are for experts in mxfp4 or nvfp4 or int4, and those of .* are in fp8"):
        load_packed(Pair("fp8").write_artifact(tmp_path), device="cpu", act="int8")


def logits_of(path, act: str | None) -> torch.Tensor:
    """Run by a worker of the interpreter."""
    model = load_packed(path, device="cpu", dtype=torch.float32, backend="triton", act=act)
    assert model.act == act
    return model.forward(IDS[:1, :2])


def test_quantized_activations_change_the_logits_a_little(artifact, model):
    """By about the relative error of the format, 9 % a product."""
    quantized = interpreted.submit("tests.runtime.test_loader:logits_of", artifact, "nvfp4").result()
    expected = model.forward(IDS[:1, :2])
    error = ((quantized - expected).square().mean() / expected.square().mean()).sqrt()
    assert 0.01 < error < 0.3


@pytest.mark.skipif(bool(native.missing()), reason="the native kernels were not built: there was no compiler")
def test_so_do_those_in_int8(artifact, model):
    """By half a percent a product; the median, for now and then a router picks another expert."""
    quantized = load_packed(artifact, device="cpu", dtype=torch.float32, act="int8")
    assert quantized.act == "int8"
    expected = model.forward(IDS)
    error = ((quantized.forward(IDS) - expected).square().mean(-1) / expected.square().mean(-1)).sqrt()
    assert 0.004 < error.median() < 0.03
