"""The decoding step as a graph takes it: padded, by buffers that stay, without a word from the host."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import random_packed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.ops import ACTS
from tutel_pack.kernels.triton import backend, chips
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.known import KNOWN
from tutel_pack.runtime import graphs
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.runtime.engine import Engine
from tutel_pack.runtime.graphs import Graphs, HostNeeded, NoHost, Step
from tutel_pack.runtime.sampling import SamplingParams
from tutel_pack.spec import (
    Attention,
    ClampedSwiglu,
    DeltaNet,
    Dynamic,
    Layer,
    Mla,
    Mlp,
    ModelSpec,
    Moe,
    Rope,
    Router,
    Yarn,
)
from tutel_pack.tensors import KEEP, canonical_tensors

# What no graph can hold


REFUSED = {
    "a number": lambda x: x.sum().item(),
    "a condition": lambda x: bool(x.sum() > 0),
    "as many as there are": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "values at a mask": lambda x: x.index_put_((x > 0,), torch.tensor(1.0)),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1])),
    "compared": lambda x: torch.equal(x, x),
    "from the host": lambda x: x.to("meta"),
    "a number from the host": lambda x: torch.tensor(3.0).to("meta"),
    "into a buffer": lambda x: torch.empty(4, device="meta").copy_(x),
    "indices of the host": lambda x: torch.empty(4, device="meta")[torch.tensor([1, 2])],
}
ALLOWED = {
    "arithmetic": lambda x: (x * 2 + torch.tensor(1.0)).to(torch.bfloat16),
    "indices": lambda x: x[torch.tensor([1, 0])],
    "rows": lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones(1)),
    "a mask that stays": lambda x: x.masked_fill(x > 0, -1),
    "a number as an argument": lambda x: torch.empty(4, device="meta") * torch.tensor(3.0),
    "new memory": lambda x: torch.empty(4, device="meta") + torch.arange(4, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_host_is_refused(name):
    with NoHost(), pytest.raises(HostNeeded, match="needs the host"):
        REFUSED[name](torch.arange(4.0))


@pytest.mark.parametrize("name", ALLOWED)
def test_the_rest_is_not(name):
    with NoHost():
        ALLOWED[name](torch.arange(4.0))


# Models of full size, of which nothing is allocated

LAYER = KNOWN["Qwen3-30B-A3B"].layers[0]


@pytest.fixture
def nothing_runs(monkeypatch) -> list[Launch]:
    """Launches, in their order, of kernels that do not run."""
    launches = []
    monkeypatch.setattr(Launch, "run", lambda self: launches.append(self))
    return launches


def weightless(
    spec: ModelSpec, fmt: str = "mxfp4", backend: str = "triton", embedding: str | None = None, act: str | None = None
) -> Decoder:
    tensors = canonical_tensors(spec)

    def load(name: str) -> Tensor | PackedTensor:
        tensor = tensors[name]
        kind = embedding if name == "model.embed_tokens.weight" else None if tensor.role == KEEP else fmt
        if kind is None:
            return torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
        return PackedTensor.empty(FORMATS[kind], tensor.shape, tensor.segments or tensor.shape[-2:-1], "meta")

    return Decoder(spec, load, "meta", torch.bfloat16, backend, act)


def run_without_host(decoder: Decoder, size: int = 4, most: int = 8) -> Tensor:
    """The step on a device without values: to ask it for one is an error, with or without NoHost."""
    cache = decoder.new_cache(2 * most)
    cache.allocate_slot()
    step = Step(decoder, cache, size, most, spare=0)
    step.run()
    with NoHost():
        return step.run()


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "GLM-5"])
def test_a_step_never_asks_the_host(name, chip, nothing_runs, monkeypatch):
    monkeypatch.setattr(backend, "chip_of", lambda device: chips.CHIPS[chip])
    spec = replace(KNOWN[name], layers=KNOWN[name].layers[2:5], mtp=())
    for fmt in ("mxfp4", "nvfp4", "fp8", "bf16"):
        logits = run_without_host(weightless(spec, fmt))
        assert logits.shape == (4, spec.vocab)
    names = {launch.kernel.__name__ for launch in nothing_runs}
    placed = {Attention: "place_heads", Mla: "place_latents"}[type(spec.layers[0].attention)]
    assert names & {"place_heads", "place_latents"} == {placed}
    assert {"grouped_matmul", "sort_pairs", "sum_pieces", "route", "attend"} <= names


class Computing(TorchDispatchMode):
    """Counts torch's operations that are launches, as those are that neither view nor allocate."""

    def __init__(self, found: list[str]):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if not views and "empty" not in func.overloadpacket.__name__:
            self._found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


LAUNCHES = {"DeepSeek-V3": 60, "Kimi-K2": 62, "Qwen3-30B-A3B": 44, "gpt-oss-120b": 49}
"""Of two layers with experts, for one sequence of 32768 positions on sm_90, at most."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_takes_few_launches(name, nothing_runs, monkeypatch):
    monkeypatch.setattr(backend, "chip_of", lambda device: chips.CHIPS["sm_90"])
    monkeypatch.setattr(Launch, "run", lambda self: found.append(self.kernel.__name__))
    counts = []
    for last in (5, 7):  # of gpt-oss, layers alternate
        decoder, found = weightless(replace(KNOWN[name], layers=KNOWN[name].layers[3:last], mtp=())), []
        step = Step(decoder, decoder.new_cache(1024), 1, 512, spare=0)
        step.run()
        found.clear()
        with Computing(found):
            step.run()
        counts.append(Counter(found))
    more = counts[1] - counts[0]
    assert more["grouped_matmul"] and more["attend"] == 2 and sum(more.values()) <= LAUNCHES[name], more


@pytest.mark.parametrize("grouped", [True, False])
def test_nor_do_delta_nets(grouped, nothing_runs):
    net = Layer(DeltaNet(16, 32, 128, 128, 4, grouped), LAYER.mlp)
    run_without_host(weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(net, LAYER))))


@pytest.mark.parametrize("act", ACTS)
def test_nor_do_quantized_activations(act, nothing_runs):
    run_without_host(weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,)), ACTS[act], act=act))
    assert [launch.kernel.__name__ for launch in nothing_runs].count("quantize") == 4, "two products in two steps"


def test_nor_does_a_packed_embedding(nothing_runs):
    run_without_host(weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,)), embedding="fp8"))


HOST_BOUND = {
    "an indexer": (KNOWN["GLM-5"].layers[4], "asks the host for the lengths"),
    "dynamic angles": (
        replace(LAYER, attention=replace(LAYER.attention, rope=Rope(1e4, 128, False, Dynamic(2.0, 4096)))),
        "asks the host for the lengths",
    ),
}


@pytest.mark.parametrize("name", HOST_BOUND)
def test_what_asks_is_seen(name, nothing_runs):
    layer, message = HOST_BOUND[name]
    hidden = 6144 if name == "an indexer" else 2048
    spec = replace(KNOWN["Qwen3-30B-A3B"], hidden=hidden, layers=(layer,))
    with pytest.raises(HostNeeded, match=message):
        run_without_host(weightless(spec))


def test_torch_s_kernels_ask(nothing_runs):
    spec = replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,))
    with pytest.raises(HostNeeded, match="asks the host for the blocks"):
        run_without_host(weightless(spec, backend="torch"))


def test_weights_without_a_kernel_ask(nothing_runs, monkeypatch):
    """Their experts are counted on the host; on this device, that alone is an error."""
    monkeypatch.setattr(backend, "is_served", lambda w: False)
    with pytest.raises((HostNeeded, NotImplementedError)):
        run_without_host(weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,))))
    assert "attend" in {launch.kernel.__name__ for launch in nothing_runs}


# Small models in the interpreter

GQA = Attention(4, 2, 16, Rope(1e4, 16), qk_norm="head")
STRETCHED = Rope(1e4, 16, False, Yarn(4.0, 64, 32.0, 1.0, False, 1.1))
NEAR = Attention(4, 2, 16, STRETCHED, bias="qkvo", sinks=True, window=7)
LATENT = Mla(3, None, 24, 12, 20, Rope(1e4, 8, True), 20**-0.5)
MOE = Moe(6, 2, 32)
GPT_OSS = Moe(6, 2, 32, Router("softmax_chosen", bias=True), activation=ClampedSwiglu(7.0, 1.702, 1.0), bias=True)
DEEPSEEK = Moe(6, 2, 32, Router("sigmoid", correction=True, groups=3, top_groups=2), shared=Mlp(32))
SMALL = {
    "grouped heads": (Layer(GQA, MOE), Layer(GQA, Mlp(48))),
    "windows and sinks": (Layer(NEAR, GPT_OSS), Layer(replace(NEAR, window=None), GPT_OSS)),
    "latents": (Layer(LATENT, DEEPSEEK),),
    "delta net": (Layer(DeltaNet(2, 4, 16, 16, 4, True), MOE), Layer(GQA, Mlp(48))),
}
BLOCK = 8


def small_decoder(name: str, device: str = "cpu") -> Decoder:
    """In float32, where a wrong position cannot hide behind rounding."""
    spec = ModelSpec("small", 64, 50, 256, 1e-5, False, SMALL[name])
    g = torch.Generator().manual_seed(4)
    weights = {}
    for i, (key, tensor) in enumerate(canonical_tensors(spec).items()):
        if tensor.role == KEEP:
            scale = 1.0 if "embed" in key else 0.3 if len(tensor.shape) == 1 else tensor.shape[-1] ** -0.5
            weights[key] = torch.randn(tensor.shape, generator=g) * scale + ("norm" in key)
        else:
            weights[key] = random_packed("mxfp4", tensor.shape, tensor.segments or None, seed=i)
    return Decoder(spec, weights.__getitem__, device, torch.float32, "triton")


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]]


def decode_twice(name: str, damage: str = "") -> list[tuple[Tensor, Tensor]]:
    """Run by a worker: (logits by `forward`, by `Step`) of two steps of three sequences, in a step of four; behind them
    the pools of both, without the spare block. damage: what is wrong with what the step is given."""
    decoder = small_decoder(name)
    runs = []
    for padded in (False, True):
        cache = decoder.new_cache(12, BLOCK)
        (spare,) = cache.allocate(1)
        for layer in cache.tokens:
            for pool in layer.values():
                pool[spare] = 0  # what nobody reads would be NaN, and not equal
        tables, slot = [cache.allocate(3) for _ in PROMPTS], cache.allocate_slot()
        slots = [cache.allocate_slot() for _ in PROMPTS]
        decoder.forward(Batch.build(PROMPTS, [0] * 3, tables, slots=slots), cache)
        step = Step(decoder, cache, 4, 5, spare, slot) if padded else None
        lengths, found = [len(p) for p in PROMPTS], []
        for new in ([7, 8, 9], [1, 2, 3]):
            if padded:
                step.fill(*damaged(damage, new, lengths, tables, slots))
                found.append(step.run()[:3])
            else:
                found.append(decoder.forward(Batch.build([[t] for t in new], lengths, tables, slots=slots), cache))
            lengths = [n + 1 for n in lengths]
        pools = [pool.nan_to_num(7.0) for layer in cache.tokens for pool in layer.values()]
        for pool in pools:
            pool[spare] = 0
        pools += [pool[slots] for layer in cache.sequences for pool in layer.values()]
        runs.append([*found, *pools])
    return list(zip(*runs))


def damaged(damage: str, tokens, past, tables, slots):
    if damage == "tokens":
        tokens = tokens[::-1]
    if damage == "lengths":
        past = [p - 1 for p in past]
    if damage == "tables":
        tables = [tables[0], tables[1], tables[2][::-1]]
    if damage == "slots":
        slots = slots[::-1]
    return tokens, past, tables, slots


def differences(pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The largest, relative to the largest value; infinite where there are NaN."""
    return [((a - b).abs().max() / a.abs().max()).nan_to_num(torch.inf).item() for a, b in pairs]


@pytest.mark.parametrize("name", SMALL)
def test_the_padded_step_is_the_step(name):
    run = interpreted.submit("tests.runtime.test_graphs:decode_twice", name)
    worst = differences(run.result())
    assert len(worst) >= 3 and max(worst) < 2e-5, worst


@pytest.mark.parametrize("damage", ["tokens", "lengths", "tables", "slots"])
def test_the_comparison_sees(damage):
    name = "delta net" if damage == "slots" else "latents"
    run = interpreted.submit("tests.runtime.test_graphs:decode_twice", name, damage)
    assert max(differences(run.result()[:2])) > 1e-2


def experts_of_a_step(name: str) -> list[Tensor]:
    """Run by a worker: the ids that `moe` is given, of two sequences in a step of four."""
    decoder, ids = small_decoder(name), []
    cache = decoder.new_cache(4, BLOCK)
    (spare,) = cache.allocate(1)
    tables = [cache.allocate(1), cache.allocate(1)]
    decoder.forward(Batch.build([[1, 2], [3]], [0, 0], tables), cache)
    kept = backend.moe
    backend.moe = lambda x, chosen, *rest: ids.append(chosen.clone()) or kept(x, chosen, *rest)
    try:
        step = Step(decoder, cache, 4, 4, spare)
        step.fill([5, 6], [2, 1], tables, [0, 0])
        step.run()
    finally:
        backend.moe = kept
    return ids


def test_padding_passes_no_expert():
    for ids in interpreted.submit("tests.runtime.test_graphs:experts_of_a_step", "windows and sinks").result():
        assert (ids[:2] >= 0).all() and (ids[2:] == -1).all()


def generated(recorded: bool) -> tuple[list[list[int]], list[int]]:
    """Run by a worker: the tokens of four prompts, of which one is much longer; and the sizes of steps."""
    decoder, sizes = small_decoder("delta net"), []

    def record(run, pool, stream):
        sizes.append(len(run()))
        with NoHost():
            run()
        return run

    engine = Engine(decoder, max_active=3, block_size=BLOCK)
    engine._graphs = Graphs(decoder, record) if recorded else None
    for prompt, most in zip([*PROMPTS, [2, 7, 1]], (2, 2, 6, 2)):
        engine.add(prompt, SamplingParams(max_new_tokens=most))
    results = {e.index: e.result.tokens for e in engine.run() if e.result}
    return [results[i] for i in range(4)], sizes


def test_the_engine_generates_the_same():
    plain, padded = (interpreted.submit("tests.runtime.test_graphs:generated", r) for r in (False, True))
    (expected, none), (tokens, sizes) = plain.result(), padded.result()
    assert tokens == expected and not none
    assert sorted(sizes) == [1, 2, 4]


# The choice


class Somewhere:
    """A decoder of the kind that graphs are for, as far as their choice looks."""

    def __init__(self, device: str):
        self.device = torch.device(device)


def test_a_cpu_has_no_graphs_and_that_needs_no_words(caplog):
    assert Graphs.of(Somewhere("cpu")) is None and not caplog.records


def test_other_modules_are_not_recorded(caplog):
    assert Graphs.of(Somewhere("cuda")) is None
    assert "without graphs: the model runs through its transformers module" in caplog.text


def on_a_gpu(decoder: Decoder) -> Decoder:
    decoder.device = torch.device("cuda")
    return decoder


def test_other_backends_are_not_recorded(caplog):
    spec = replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,))
    assert isinstance(Graphs.of(on_a_gpu(weightless(spec))), Graphs) and not caplog.records
    assert Graphs.of(on_a_gpu(weightless(spec, backend="torch"))) is None
    assert "the backend torch waits for the device" in caplog.text


def test_a_step_that_cannot_be_recorded_is_tried_once(caplog):
    decoder, tries = weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,))), []

    def refuse(run, pool, stream):
        tries.append(run)
        raise HostNeeded("an operation needs the host")

    found = Graphs(decoder, refuse)
    found.bind(decoder.new_cache(4), 2)
    assert found.forward([1], [0], [[2]], [1]) is None
    assert found.forward([1, 2], [0, 0], [[2], [3]], [1, 2]) is None
    assert len(tries) == 1 and caplog.text.count("decoding without graphs: an operation needs the host") == 1


NET = Layer(DeltaNet(16, 32, 128, 128, 4, True), LAYER.mlp)


@pytest.mark.parametrize("layer, recordings", [(LAYER, 1), (NET, 2)], ids=["tokens alone", "states"])
def test_graphs_are_kept_until_states_move(layer, recordings, monkeypatch):
    """Others then have a pool of their own, for torch closes one whose graphs are gone; the stream stays."""
    decoder, calls = weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(layer,))), []
    cache = decoder.new_cache(4)
    monkeypatch.setattr(graphs, "Step", lambda *args: SimpleNamespace(run=None, fill=lambda *args: None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    found = Graphs(on_a_gpu(decoder), lambda *args: calls.append(args) or (lambda: torch.zeros(1, 1)))
    found.bind(cache, 2)
    for _ in range(2):
        found.forward([1], [0], [[2]], [cache.allocate_slot()])
        found.forward([1], [0], [[2]], [0])
        cache.allocate_slot()
    assert len({pool for _, pool, _ in calls}) == len(calls) == recordings
    assert len({stream for *_, stream in calls}) == 1


def test_the_last_copies_are_waited_for():
    """Buffers of the host may still be on their way to the device."""
    decoder = weightless(replace(KNOWN["Qwen3-30B-A3B"], layers=(LAYER,)))
    step, seen = Step(decoder, decoder.new_cache(4), 2, 2, spare=0), []
    step._copied = SimpleNamespace(
        synchronize=lambda: seen.append(("waited", step._host[0][0].tolist())),
        record=lambda stream: seen.append(("copied", step._host[0][0].tolist())),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        step.fill([7, 8], [0, 0], [[1], [2]], [0, 0])
    assert seen == [("waited", [0, 0]), ("copied", [7, 8])]


def test_frequencies_stay_where_graphs_read_them():
    ropes = [Rope(1e4 + i, 64) for i in range(100)]
    kept = [torch_backend._frequencies_on(rope, torch.device("cpu")) for rope in ropes]
    assert all(torch_backend._frequencies_on(rope, torch.device("cpu")) is f for rope, f in zip(ropes, kept))


def test_the_recording_itself_waits_for_nothing():
    """As far as it can be tried without a GPU: what is to be recorded is run under NoHost before that."""
    with pytest.raises(HostNeeded, match="needs the host"):
        graphs.record(lambda: torch.ones(1).sum().item(), None, None)


def test_a_recording_that_fails_gives_the_stream_back(monkeypatch):
    """torch.cuda.graph, which ends by an exception, leaves its own stream the current one."""
    streams = ["before"]

    @contextmanager
    def graph(made, pool, stream):
        streams.append(stream)
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {
        "device": nullcontext, "synchronize": lambda: None, "CUDAGraph": object, "graph": graph,
        "current_stream": lambda: streams[-1], "set_stream": streams.append,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    side = SimpleNamespace(device="cuda:1")
    with pytest.raises(HostNeeded, match="the device's driver refuses it: operation failed"):
        graphs.record(lambda: torch.ones(1), None, side)
    assert streams == ["before", side, "before"]
