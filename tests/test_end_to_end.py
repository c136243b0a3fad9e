"""A checkpoint as transformers publishes it, through both halves, against transformers holding the decoded weights."""

import pytest
import torch

from tests.runtime.models import make_model
from tutel_pack import load_packed
from tutel_pack.artifact import Artifact
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.formats import PackedTensor
from tutel_pack.quant.codec import decode

LIMIT = 1e-4
GREEDY = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two layers, a dense one and one of 8 experts, with ragged blocks; a tensor per expert, in several shards."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(mlp_only_layers=[0]).bfloat16().save_pretrained(folder, max_shard_size="300kB")
    return folder


def holding(artifact: Artifact):
    """transformers' model in float32 with the artifact's values."""
    theirs = make_model(mlp_only_layers=[0])
    for name, parameter in theirs.named_parameters():
        found = artifact.load(name)
        parameter.copy_(decode(found) if isinstance(found, PackedTensor) else found)
    return theirs


def worst_position(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).nan_to_num(torch.inf).max().item()


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4", "bf16"])
def test_the_artifact_speaks_as_transformers_does(checkpoint, tmp_path, fmt):
    out = convert_checkpoint(str(checkpoint), tmp_path / fmt, fmt=fmt)
    ours, theirs = load_packed(out, dtype=torch.float32), holding(Artifact(out))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ours.spec.vocab, (3, 40), generator=generator)
    logits = ours.forward(ids)
    assert worst_position(logits, theirs(ids).logits) < LIMIT
    # The formats differ by more than the limit, so this is no comparison of a model with itself.
    if fmt != "bf16":
        assert worst_position(logits, make_model(mlp_only_layers=[0]).bfloat16().float()(ids).logits) > 10 * LIMIT
    prompts = [ids[0, :12].tolist(), ids[1, :3].tolist(), ids[2, :29].tolist()]
    expected = [theirs.generate(torch.tensor([p]), **GREEDY)[0, len(p) :].tolist() for p in prompts]
    assert [r.tokens for r in ours.generate(prompts, max_new_tokens=64, temperature=0)] == expected
    assert ours.generate(prompts[1], max_new_tokens=64, temperature=0).tokens == expected[1]
    assert len({tuple(e) for e in expected}) == 3
