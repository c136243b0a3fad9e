"""Models without a description in spec.py: their tensors are those of their transformers module, built without weights.

Both sides build it from config.json, so that they agree on names and shapes. transformers is imported when asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
from torch import nn

from tutel_pack.errors import InputError
from tutel_pack.tensors import ATTENTION, EXPERTS, HEAD, KEEP, SHARED, TensorSpec, layer_of

MOST_LAYERS = 10_000
"""No decoder comes near; a damaged config.json must not make us build billions."""
_ROWS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
_UNMARKED = {
    "Step3p7Experts": _ROWS,
    "Llama4TextExperts": _ROWS | {"is_transposed": True},
}
"""Class -> what `use_experts_implementation` would say of it, of experts modules that are not marked by it."""
_GATED, _PLAIN = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")


def build(config: dict, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The causal language model of a config.json on the meta device, in evaluation mode. dtype: of its parameters.

    Of a model that sees or hears too, only what text goes through: see `left_out`. No code but that of transformers is
    run. InputError if it has no such model, or cannot build it.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    auto = _auto_class(CONFIG_MAPPING[model_type]) if knows(model_type) else None
    if auto is None:
        refuse(model_type, "transformers has no causal language model of that type")
    # How the checkpoint is quantized is no matter of the module, and an author's code is never run.
    ignored = ("quantization_config", "auto_map", "dtype", "torch_dtype")
    values = {k: _without_markers(v) for k, v in config.items() if k not in ignored}
    # Before the config object, which may list all layers.
    counts = [d.get("num_hidden_layers") for d in (config, *config.values()) if isinstance(d, dict)]
    if any(type(n) is int and n > MOST_LAYERS for n in counts):
        refuse(model_type, f"its config.json asks for more than {MOST_LAYERS} layers")
    try:
        made = CONFIG_MAPPING[model_type].from_dict(values)
        with torch.device("meta"):
            model = auto.from_config(made, dtype=dtype, trust_remote_code=False).eval()
    except Exception as e:  # whatever a module of transformers raises for a config that it cannot take
        refuse(model_type, f"transformers cannot build it ({type(e).__name__}: {' '.join(str(e).split())[:300]})")
    for name in left_out(model):
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = None
    for module in model.modules():
        vars(module).update(_UNMARKED.get(type(module).__name__, {}))
    return model


def _without_markers(value: object) -> object:
    """A value of config.json with what transformers writes for numbers that JSON has not: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        marker = value.get("__float__")
        known = len(value) == 1 and marker in ("Infinity", "-Infinity", "NaN")
        return float(marker) if known else {k: _without_markers(v) for k, v in value.items()}
    return [_without_markers(v) for v in value] if isinstance(value, list) else value


def _auto_class(config_class: type) -> type | None:
    """The class of transformers that makes a model of text out of such a config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # Checkpoints of models that see name their tensors as the larger class does.
    known = (AutoModelForImageTextToText, AutoModelForCausalLM)
    return next((auto for auto in known if config_class in auto._model_mapping), None)


def decoder_of(model: nn.Module) -> tuple[str, nn.Module]:
    """(name, module) of what embeds tokens and passes them through the layers."""
    embeddings = model.get_input_embeddings()
    name = next(name for name, m in model.named_modules() if m is embeddings).rpartition(".")[0]
    return name, model.get_submodule(name)


def causal_of(model: nn.Module) -> nn.Module:
    """The innermost module that makes logits of tokens: it has both the decoder and the head."""
    common = os.path.commonprefix([decoder_of(model)[0].split("."), head_name(model).split(".")])
    return model.get_submodule(".".join(common))


def left_out(model: nn.Module) -> list[str]:
    """Names of the parts with weights that stand beside the decoder and the head of a model that takes more than text,
    its towers and projectors, whether they are still there or taken out."""
    used = [decoder_of(model)[0] + ".", head_name(model) + "."]
    path = used[0].split(".")[:-1]
    found = []
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        children = model.get_submodule(parent)._modules.items()
        for name, part in children:
            name = ".".join((*path[:depth], name))
            # What has no parameters, such as the cap of logits, is not left out: it may belong to the head.
            weighs = part is None or next(part.parameters(), None) is not None
            if weighs and not any(u.startswith(name + ".") for u in used):
                found.append(name)
    return found


def knows(model_type: object) -> bool:
    """Whether transformers has that model type."""
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def refuse(model_type: object, reason: str) -> None:
    """Raise the InputError of a model that cannot be handled."""
    raise InputError(f"The model type {model_type!r:.100} runs neither natively nor by the general path: {reason}.")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module that holds all experts of a layer in 3-D parameters.

    Such a module has what transformers' `use_experts_implementation` gives it: has_gate, has_bias, is_transposed,
    is_concatenated, has_post_expert_norm and _apply_gate. InputError if there are none, or experts in another form.
    """
    model_type = model.config.model_type
    found = {name: m for name, m in model.named_modules() if hasattr(m, "is_concatenated") and hasattr(m, "has_gate")}
    for name, module in found.items():
        if reason := _unknown(module):
            refuse(model_type, f"{name} ({type(module).__name__}) {reason}")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            refuse(model_type, f"{name} is a list of modules, not one that has all experts in 3-D parameters")
    for name, p in model.named_parameters():
        if p.ndim == 3 and "expert" in name and name.rpartition(".")[0] not in found:
            refuse(model_type, f"{name} {list(p.shape)} are weights of experts in a layout that is not known")
    if not found:
        refuse(model_type, "it has no experts whose weights are 3-D parameters of one module")
    return found


def _unknown(module: nn.Module) -> str:
    """What is not known of the layout of an experts module, empty if all is."""
    weights = expert_weights(module)
    wanted = {*weights, *(f"{name}_bias" for name in weights if module.has_bias)}
    if (held := {name for name, _ in module.named_parameters(recurse=False)}) != wanted:
        return f"holds {', '.join(sorted(held))} where {', '.join(sorted(wanted))} are known"
    if not module.is_concatenated and module.has_gate:
        return "interleaves gate and up"
    up, down = (tuple(getattr(module, name).shape) for name in weights)
    if module.is_transposed:
        up, down = (up[0], *up[:0:-1]), (down[0], *down[:0:-1])
    if len(up) != 3 or len(down) != 3 or up != (down[0], down[2] * (2 if module.has_gate else 1), down[1]):
        return f"has weights of shapes {list(up)} and {list(down)}, which do not belong together"
    return ""


def expert_weights(module: nn.Module) -> tuple[str, str]:
    """Names of the two weights of an experts module: into the experts, out of them."""
    return _GATED if module.has_gate else _PLAIN


def describe(model: nn.Module, tied_head: bool) -> dict[str, TensorSpec]:
    """Canonical name -> TensorSpec of all that the module is made of, in the order of the layers and then the rest.

    Canonical names are those of its parameters and persistent buffers. InputError as of `experts_of`.
    """
    experts = experts_of(model)
    head = head_name(model)
    kept = {f"{name}.{n}": p for name, m in model.named_modules() for n, p in _persistent(m, name)}
    tensors = {
        name.removeprefix("."): TensorSpec(tuple(p.shape), KEEP, whole=p.dtype == torch.int64) for name, p in kept.items()
    }
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            tensors[f"{name}.weight"] = TensorSpec(tuple(module.weight.shape), _role(name, module, experts))
    for name, module in experts.items():
        tensors.update(_expert_tensors(name, module))
    tensors.pop(f"{head}.weight", None)
    if not tied_head:
        tensors[f"{head}.weight"] = TensorSpec(tuple(model.get_output_embeddings().weight.shape), HEAD)
    return dict(sorted(tensors.items(), key=lambda item: _place(item[0])))


def head_name(model: nn.Module) -> str:
    """The name of the module that makes logits. InputError if it is none that is known."""
    head = model.get_output_embeddings()
    name = next((name for name, m in model.named_modules() if m is head), None)
    if name is None or type(head) is not nn.Linear or head.bias is not None:
        refuse(model.config.model_type, "its logits do not come from one linear layer without bias")
    return name


def _persistent(module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from (b for b in module.named_buffers(recurse=False) if b[0] not in module._non_persistent_buffers_set)


def _role(name: str, module: nn.Linear, experts: dict[str, nn.Module]) -> str:
    """Linear layers of one row for each expert are routers, those of one row gates."""
    block = next((m for at, m in experts.items() if name.startswith(at.rpartition(".")[0] + ".")), None)
    if block is not None:
        count = getattr(block, expert_weights(block)[0]).shape[0]
        if module.out_features in (1, count):
            return KEEP
    return SHARED if any(part.startswith("shared") for part in name.split(".")) else ATTENTION


def _expert_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, TensorSpec]]:
    """Logical shapes, [E, rows, columns], whichever way the module has them."""
    for weight in expert_weights(module):
        e, n, k = getattr(module, weight).shape
        n, k = (k, n) if module.is_transposed else (n, k)
        segments = (n // 2, n // 2) if weight == "gate_up_proj" else ()
        yield f"{name}.{weight}", TensorSpec((e, n, k), EXPERTS, segments)


def _place(name: str) -> int:
    layer = layer_of(name)
    return sys.maxsize if layer is None else layer
