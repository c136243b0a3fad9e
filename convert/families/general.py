"""Any other MoE that transformers has a module for: names and shapes come from the module, spellings from its mapping.

The mapping is the one by which transformers itself loads checkpoints: renamings of source names, the names of the parts
of fused weights, and experts that may be transposed. What it does beyond that, such as splitting, is not done here: such
checkpoints fail as incomplete, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from torch import nn

from tutel_pack import general
from tutel_pack.convert.families import Family
from tutel_pack.spec import General

_DEFAULT = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "up_proj": ("up_proj.weight",),
    "down_proj": ("down_proj.weight",),
}
"""How the parts of fused experts are spelled where the mapping says nothing."""
_SKIPS = {r".*rotary_emb\.inv_freq": "a buffer that follows from the config"}
_LEFT_OUT = "its transformers module has no such part"
_NOT_TEXT = "of what the model sees or hears: only its text part is converted"
_MERGES = {"MergeModulelist", "Concatenate"}


def find(config: dict) -> Family | None:
    """The family of a config.json that no native one has; None if transformers does not know its model type either.

    InputError says what the model lacks if it cannot be handled.
    """
    model_type = config.get("model_type")
    if not general.knows(model_type):
        return None
    model = general.build(config)
    tensors = general.describe(model, tied_head=False)
    renamings, converters = _mapping(model)
    left_out = general.left_out(model)
    sources = _joined(tensors, converters) | _expert_sources(model, converters)
    return Family(
        model_types=(model_type,),
        spec=lambda _: _spec(model),
        renames={re.escape(name): parts for name, parts in sources.items()},
        skips=_skips(model, left_out),
        transposed=tuple(re.escape(name) for name, m in _fused(model).items() if m.is_transposed),
        transposable=tuple(re.escape(name) for name in tensors if _maker(name, converters, _may_transpose_experts)),
        tensors=lambda spec: general.describe(model, spec.tied_head),
        spell=_speller(renamings, [*tensors, *left_out]),
        undone=_undone(converters),
    )


def _skips(model: nn.Module, left_out: list[str]) -> dict[str, str]:
    other = {rf"{re.escape(name)}\..*": _NOT_TEXT for name in left_out}
    return _SKIPS | other | {f".*(?:{p}).*": _LEFT_OUT for p in model._keys_to_ignore_on_load_unexpected or ()}


def _spec(model: nn.Module) -> General:
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if type(context) is not int or context < 1:
        general.refuse(config.model_type, "its config.json has no max_position_embeddings")
    vocab, hidden = model.get_input_embeddings().weight.shape
    return General(
        model_type=model.config.model_type,
        depth=config.num_hidden_layers,
        hidden=hidden,
        vocab=vocab,
        context=context,
        tied_head=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )


def _mapping(model: nn.Module) -> tuple[list, list]:
    """(renamings, converters) by which transformers loads checkpoints of this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = get_model_conversion_mapping(model, add_legacy=False)
    converters = [t for t in found if isinstance(t, WeightConverter)]
    return [t for t in found if t not in converters], converters


def _undone(converters: list) -> dict[str, str]:
    """What transformers does on loading beyond merging and transposing, by the names of what it makes."""
    undone = {}
    for c in converters:
        operations = [type(op).__name__ for op in c.operations]
        if not set(operations) <= _MERGES | {"Transpose"}:
            reason = f"transformers makes it of {', '.join(map(_plain, c.source_patterns))} by {', '.join(operations)} on loading"
            undone |= {re.escape(_plain(target)): reason for target in c.target_patterns}
    return undone


def _joined(tensors: Collection[str], converters: list) -> dict[str, tuple[str, ...]]:
    """Canonical name of a weight whose rows the source holds as several -> their names."""
    found = {name: _maker(name, converters, _stacks_rows) for name in tensors}
    return {name: _parts(name, converter) for name, converter in found.items() if converter}


def _maker(name: str, converters: list, does: Callable[[object], bool]):
    """The converter that makes a canonical tensor, and nothing else, in that way; None if there is none."""
    for converter in converters:
        if len(converter.target_patterns) == 1 and name.endswith(_plain(converter.target_patterns[0])) and does(converter):
            return converter
    return None


def _parts(name: str, converter) -> tuple[str, ...]:
    """Names of what a canonical tensor is made of, with {expert} for the expert."""
    start = name.removesuffix(_plain(converter.target_patterns[0]))
    return tuple(start + _plain(source).replace("*", "{expert}") for source in converter.source_patterns)


def _merges_experts(converter) -> bool:
    return {type(op).__name__ for op in converter.operations} <= _MERGES


def _stacks_rows(converter) -> bool:
    return _does_alone(converter, "Concatenate", "dim", 0)


def _may_transpose_experts(converter) -> bool:
    return _does_alone(converter, "Transpose", "dim0", 1)


def _does_alone(converter, operation: str, dimension: str, value: int) -> bool:
    """Whether it is that one operation, on sources that are named one by one."""
    done = [type(op).__name__ for op in converter.operations] == [operation]
    return done and getattr(converter.operations[0], dimension) == value and "*" not in str(converter.source_patterns)


def _expert_sources(model: nn.Module, converters: list) -> dict[str, tuple[str, ...]]:
    """Canonical name of a fused weight -> names of its parts, with {expert} for the expert."""
    return {name: _sources(name, converters) for name in _fused(model)}


def _fused(model: nn.Module) -> dict[str, nn.Module]:
    """Canonical name of a weight of all experts -> the module that holds it."""
    return {f"{name}.{w}": m for name, m in general.experts_of(model).items() for w in general.expert_weights(m)}


def _sources(name: str, converters: list) -> tuple[str, ...]:
    if converter := _maker(name, converters, _merges_experts):
        return _parts(name, converter)
    block, _, weight = name.rpartition(".")
    return tuple(f"{block}.{{expert}}.{part}" for part in _DEFAULT[weight])


def _plain(pattern: str) -> str:
    """A mapping's pattern as the text that it stands for."""
    return pattern.replace("\\", "").strip("^$")


def _speller(renamings: list, canonical: Collection[str]) -> Callable[[str], str]:
    """From a source name to the one that canonical names and the parts of experts follow from."""
    tops = {name.split(".")[0] for name in canonical}
    base = {name.split(".")[1]: name.split(".")[0] for name in canonical if "." in name}

    def spell(name: str) -> str:
        if name in canonical:  # a renaming may hit it all the same, being meant for makers' names
            return name
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        top = name.split(".")[0]
        return f"{base[top]}.{name}" if top in base and top not in tops else name

    return spell
