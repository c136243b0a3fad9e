"""GLM-5, 5.1, 5.2: sparse attention as in DeepSeek-V3.2, where a layer may take what one before it picked."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.common import PER_EXPERT
from tutel_pack.convert.families.config import Config
from tutel_pack.convert.families.deepseek_v3 import SKIPS, decoder, kinds, latent_attention, listed_dense_layers
from tutel_pack.convert.families.deepseek_v32 import INDEX_ALIASES, indexer, require_plain
from tutel_pack.errors import InputError
from tutel_pack.spec import ModelSpec


def spec(config: dict) -> ModelSpec:
    c = Config(config, INDEX_ALIASES)
    require_plain(c)
    picks = latent_attention(c, config, interleaved=True, indexer=indexer(c, interleaved=True))
    reuses, shared = latent_attention(c, config, interleaved=True, reuse_index=True), _shared(c, config)
    return decoder("glm_moe_dsa", c, lambda layer: reuses if layer in shared else picks, listed_dense_layers(c, config))


def _shared(c: Config, config: dict) -> set[int]:
    """The layers without an indexer of their own: by list, by pattern or by period, of which the first given counts."""
    layers = c.layers()
    types = kinds(config, "indexer_types", ("full", "shared"), layers)
    types = types or kinds(config, "index_topk_pattern", ("F", "S", "full", "shared"), layers)
    if types:
        found = {layer for layer, kind in enumerate(types) if kind in ("shared", "S")}
    else:
        # The first `offset` layers pick, and every freq-th from the last of them on.
        freq, offset = max(1, c.size("index_topk_freq", 1, least=0)), c.size("index_skip_topk_offset", 2, least=0)
        found = {layer for layer in range(layers) if max(layer - offset + 1, 0) % freq}
    if 0 in found:
        raise InputError("config.json lets the first layer reuse the picks of a layer before it: it is damaged.")
    return found


FAMILY = Family(
    model_types=("glm_moe_dsa",),
    spec=spec,
    renames=PER_EXPERT,
    skips=SKIPS
    | {
        r"model\.layers\.\d+\.self_attn\.indexer\.(wq_b|wk|weights_proj|k_norm)\.(weight|bias)": (
            "an indexer in a layer that takes the picks of one before it"
        )
    },
)
