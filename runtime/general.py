"""The general path: a model runs as its transformers module, with packed experts and linear layers put in.

Slower than the native decoder: sequences run one after another, each with a cache of transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tutel_pack import general
from tutel_pack.errors import InputError, ResourceError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import Ops, Weight, get_ops
from tutel_pack.quant.codec import decode
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.spec import General

_UNSET = {torch.int64: torch.iinfo(torch.int64).min, torch.int32: torch.iinfo(torch.int32).min}
"""What stands for integers that nobody has computed."""


class GeneralDecoder:
    """A model with its weights, packed as they come. The interface is that of `decoder.Decoder`.

    config: the checkpoint's config.json.  weights: canonical name (see general.describe) -> Tensor or PackedTensor.
    dtype: of activations and the cache.  backend, act: see kernels.ops.get_ops.
    InputError if a weight's shape is not what the module has, or if the module cannot be made to run.
    """

    def __init__(
        self,
        spec: General,
        config: dict,
        weights: Callable[[str], Weight],
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        act: str | None = None,
    ):
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self._model = general.build(config, dtype)
        self._model.requires_grad_(False)
        self._causal, (_, self._layers) = general.causal_of(self._model), general.decoder_of(self._model)
        take = _Weights(weights, general.describe(self._model, spec.tied_head), self.device, dtype)
        _put_in(self._model, spec, take, get_ops(backend, self.device, act))
        _fill(self._model, take)
        _compute_buffers(self._model, self.device)
        self._scaled = _RopeState(self._model)
        takes = inspect.signature(self._causal.forward).parameters
        self._picks_rows = "logits_to_keep" in takes
        # transformers renames the cache, which all modules have under one of the two names.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"

    def new_cache(self, blocks: int, block_size: int = 64) -> GeneralCache:
        """An empty cache for blocks · block_size tokens, which takes memory as sequences grow."""
        return GeneralCache([], blocks, block_size, self.device, self.dtype)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: GeneralCache, hidden: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """As `Decoder.forward`. ResourceError if the device's memory is full."""
        logits = torch.empty(len(batch.rows), self.spec.vocab, device=self.device)
        states = torch.empty(len(batch.tokens), self.spec.hidden, dtype=self.dtype, device=self.device)
        for table, start, stop in zip(batch.block_tables, batch.starts, batch.starts[1:]):
            if start == stop:
                continue
            wanted = (batch.rows >= start) & (batch.rows < stop)
            past = cache.past(table[0], int(batch.positions[start]), stop - start)
            new = slice(start, stop)
            try:
                kept = states[new] if hidden else None
                logits[wanted] = self._run(batch.tokens[new], past, batch.rows[wanted] - start, kept)
            except torch.OutOfMemoryError as e:
                reason = f"The memory of {self.device} is full: run fewer or shorter sequences at once."
                raise ResourceError(reason) from e
        return (logits, states) if hidden else logits

    def _run(self, tokens: Tensor, past: _Past, rows: Tensor, states: Tensor | None) -> Tensor:
        """Logits of `rows` among a sequence's new tokens [n]; with `states` [n, H], fill these."""
        self._scaled.reset()
        step = len(tokens) if past.takes_chunks else 1
        logits = torch.empty(len(rows), self.spec.vocab, device=self.device)
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            here = (rows >= first) & (rows < first + step)
            logits[here] = self._call(tokens[part], past, rows[here] - first, None if states is None else states[part])
        return logits

    def _call(self, tokens: Tensor, past: _Past, rows: Tensor, states: Tensor | None) -> Tensor:
        keep = {"logits_to_keep": rows} if self._picks_rows else {}

        def take_states(module, arguments, out) -> None:
            if states is not None:
                states.copy_(out[0][0])

        hook = self._layers.register_forward_hook(take_states)
        try:
            out = self._causal(input_ids=tokens[None], use_cache=True, **{self._cache_name: past.cache}, **keep)
        finally:
            hook.remove()
        past.cache = getattr(out, self._cache_name, None)
        if past.cache is None:
            general.refuse(self.spec.model_type, "its module keeps no cache of the past")
        return (out.logits[0] if keep else out.logits[0, rows]).float()


class GeneralCache(PagedCache):
    """Counts blocks as any cache, and keeps for each sequence what its transformers module keeps, by its first block."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._pasts: dict[int, _Past] = {}

    def past(self, block: int, position: int, new: int) -> _Past:
        """What is kept of the sequence whose first block this is, before `new` tokens from `position` on.

        ValueError unless these follow the tokens that were run last.
        """
        if position == 0:
            self._pasts[block] = _Past()
        found = self._pasts.get(block)
        if found is None or found.length != position:
            have = found.length if found else 0
            raise ValueError(f"tokens from position {position} on do not follow the {have} that were run")
        found.length += new
        return found

    def free(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        super().free(ids)
        for block in ids:
            self._pasts.pop(block, None)

    def snapshot(self, slot: int) -> list[Tensor]:
        raise NotImplementedError("the general path keeps no snapshots")


class _Past:
    """cache: of transformers; None before the first token.  length: tokens in it."""

    def __init__(self):
        self.cache, self.length = None, 0

    @property
    def takes_chunks(self) -> bool:
        """Whether several tokens may follow at once: modules with states of their own take only one."""
        if self.cache is None:
            return True
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        layers = getattr(self.cache, "layers", [None])
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class _Weights:
    """Weights by canonical name, checked against the module's shapes and put on the device."""

    def __init__(self, load: Callable[[str], Weight], tensors: dict, device: torch.device, dtype: torch.dtype):
        self._load, self._tensors, self.device, self.dtype = load, tensors, device, dtype

    def __call__(self, name: str) -> Weight:
        """InputError if the weight has another shape than the module."""
        weight, shape = self._load(name), self._tensors[name].shape
        if tuple(weight.shape) != shape:
            raise InputError(
                f"{name} has shape {tuple(weight.shape)} where its transformers module has {shape}: convert again."
            )
        return weight.to(self.device)

    def plain(self, name: str, dtype: torch.dtype) -> Tensor:
        """Decoded if it is packed. Whole numbers stay what they are."""
        weight = self(name)
        if isinstance(weight, PackedTensor):
            return decode(weight, dtype)
        return weight.to(dtype) if weight.is_floating_point() else weight


class PackedLinear(nn.Module):
    """nn.Linear with a packed weight. wide: compute in float32.

    `weight` decodes it, for modules that look at their parts' weights.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, ops: Ops, wide: bool = False):
        super().__init__()
        self._packed, self._dtype, self._ops, self._wide = weight, dtype, ops, wide
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        packed = self._packed
        return decode(packed, self._dtype) if isinstance(packed, PackedTensor) else packed.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        flat = x.reshape(-1, self.in_features)
        y = self._ops.linear(flat.float() if self._wide else flat, self._packed, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class PackedExperts(nn.Module):
    """An experts module of transformers with packed weights; what it does between its products stays its own.

    module: the original one, without its weights.  up, down: [E, N, K].
    """

    def __init__(self, module: nn.Module, up: Weight, down: Weight, biases: list[Tensor | None], ops: Ops):
        super().__init__()
        self.__dict__["_original"] = module  # not a child: its parameters are not ours
        for name, child in module.named_children():
            setattr(self, name, child)
        self._up, self._down, self._biases, self._ops = up, down, biases, ops
        self._swiglu = _is_swiglu(module)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """x [T, H], ids [T, k] of which those behind the last expert contribute nothing, weights [T, k] -> [T, H].

        Without ids, as Llama 4 does it, x [E·T, H] holds rows for every expert in turn, zeros where it is not chosen.
        """
        if top_k_index is None:
            top_k_index = self._owners(hidden_states)
            top_k_weights = hidden_states.new_ones(len(hidden_states), 1)
        ids = top_k_index.masked_fill(top_k_index >= self._down.shape[0], -1)
        if self._swiglu:
            bias, down_bias = self._biases
            return self._ops.moe(
                hidden_states, ids, top_k_weights.float(), self._up, self._down, gate_up_bias=bias, down_bias=down_bias
            )
        total = torch.zeros(*ids.shape, hidden_states.shape[1], dtype=torch.float32, device=hidden_states.device)
        for e in ids.unique().tolist():
            if e >= 0:
                token, place = torch.where(ids == e)
                total[token, place] = self._expert(e, hidden_states[token]).float()
        return (total * top_k_weights.float()[..., None]).sum(1).to(hidden_states.dtype)

    def _owners(self, x: Tensor) -> Tensor:
        """int64 [E·T, 1]: the expert of each row, −1 for rows of zeros, which experts without biases keep."""
        experts = self._down.shape[0]
        owners = torch.arange(experts, device=x.device).repeat_interleave(len(x) // experts)
        return owners.masked_fill(~x.any(-1), -1)[:, None]

    def _expert(self, e: int, x: Tensor) -> Tensor:
        up_bias, down_bias = (None if b is None else b[e] for b in self._biases)
        inner = self._ops.linear(x, _matrix(self._up, e), up_bias)
        inner = self._original._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        out = self._ops.linear(inner, _matrix(self._down, e), down_bias)
        return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out


def _is_swiglu(module: nn.Module) -> bool:
    """Whether ops.moe computes what the module does."""
    gate = getattr(type(module), "_apply_gate", None)
    own_gate = gate is not None and gate.__name__ != "_default_apply_gate"
    if own_gate or not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return False
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _matrix(w: Weight, e: int) -> Weight:
    return w.expert(e) if isinstance(w, PackedTensor) else w[e]


def _put_in(model: nn.Module, spec: General, take: _Weights, ops: Ops) -> None:
    """Replace experts and linear layers by packed ones."""
    head = general.head_name(model)
    embedding = next(name for name, m in model.named_modules() if m is model.get_input_embeddings())
    for name, module in general.experts_of(model).items():
        up, down = general.expert_weights(module)
        biases = [take.plain(f"{name}.{n}_bias", take.dtype) if module.has_bias else None for n in (up, down)]
        weights = take(f"{name}.{up}"), take(f"{name}.{down}")
        for parameter in list(module._parameters):
            delattr(module, parameter)
        _replace(model, name, PackedExperts(module, *weights, biases, ops))
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            weight = take(f"{embedding if name == head and spec.tied_head else name}.weight")
            bias = None if module.bias is None else take.plain(f"{name}.bias", module.bias.dtype)
            # Among logits rounded to bfloat16 the largest is often shared, and the choice then arbitrary.
            _replace(model, name, PackedLinear(weight, bias, take.dtype, ops, wide=name == head))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _fill(model: nn.Module, take: _Weights) -> None:
    """Give all other parameters and persistent buffers their values."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for n, p in module._parameters.items():
            if p is not None and p.is_meta:
                value = take.plain(prefix + n, _dtype(model, prefix + n, p.dtype))
                module._parameters[n] = nn.Parameter(value, requires_grad=False)
        for n, b in module._buffers.items():
            if b is not None and n not in module._non_persistent_buffers_set:
                # Those stored in float32, such as corrections of routers, tell apart what narrower types do not.
                stored = take(prefix + n)
                wide = isinstance(stored, Tensor) and stored.dtype == torch.float32
                module._buffers[n] = take.plain(prefix + n, torch.float32 if wide else take.dtype)


def _dtype(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Float32 for what the module's author wants computed in it, else what the module says."""
    strict = model._keep_in_fp32_modules_strict or ()
    kept = {*strict, *(model._keep_in_fp32_modules or ())} if dtype == torch.float16 else set(strict)
    return torch.float32 if set(name.split(".")) & kept else dtype


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers that follow from the config: computed by the initialisation of their modules.

    InputError if one is not: it holds what no computation gives, and that is looked for afterwards.
    """
    for p in (*model.parameters(), *model.buffers()):
        p._is_hf_initialized = True  # transformers initialises nothing that is marked so
    for name, module in model.named_modules():
        missing = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        for n in missing:
            kind = module._buffers[n].dtype
            value = torch.nan if kind.is_floating_point else _UNSET.get(kind, 0)
            module._buffers[n] = torch.full(module._buffers[n].shape, value, dtype=kind, device=device)
        if missing:
            model._init_weights(module)
        for n in missing:
            left = module._buffers[n]
            unset = left.isnan() if left.is_floating_point() else left == _UNSET.get(left.dtype, 2)
            if unset.any() or left.is_meta:
                general.refuse(model.config.model_type, f"its buffer {name}.{n} follows from nothing that is stored")
        forgotten = [n for n, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        if forgotten:
            general.refuse(model.config.model_type, f"its tensor {name}.{forgotten[0]} is neither a parameter nor a buffer")


class _RopeState:
    """Frequencies that depend on the longest sequence seen: what one sequence saw must not concern the next."""

    def __init__(self, model: nn.Module):
        self._kept = []
        for module in model.modules():
            seen = {n: v for n, v in vars(module).items() if n.endswith("max_seq_len_cached")}
            if seen:
                self._kept.append((module, seen, dict(module._buffers)))

    def reset(self) -> None:
        for module, seen, buffers in self._kept:
            vars(module).update(seen)
            module._buffers.update(buffers)
