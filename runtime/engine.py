"""Continuous batching: sequences of unequal lengths in one ragged batch, joining when there is room, leaving when done.

Every step runs what all active sequences have new, their last token or the next part of their prompt, and samples one
token for each that is up to date. What a sequence is given depends on its own tokens alone; but kernels and tiles are
chosen by the number of rows, so its company can change the last bits of sums, and with them a token that was near a
tie.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from tutel_pack.errors import InputError, ResourceError
from tutel_pack.runtime import chat as chat_template
from tutel_pack.runtime.batch import STEP_TOKENS, Batch
from tutel_pack.runtime.defaults import end_tokens, sampling_params
from tutel_pack.runtime.graphs import Graphs
from tutel_pack.runtime.sampling import Sampler, SamplingParams, sample
from tutel_pack.runtime.text import TextStream, encode

MAX_ACTIVE = 64
"""Sequences in the batch at most; more of them wait."""
HEADROOM = 1024
"""Tokens of answer that the cache has room for at first, per sequence. It grows when they are used up."""


@dataclass(frozen=True)
class Result:
    """A finished sequence.

    text: of the answer, up to a stop string; empty without a tokenizer.  tokens: ids of the answer, with the end token.
    finish_reason: "stop" at an end token or stop string, "length" at max_new_tokens or the end of the context.
    prompt_tokens: how many.  prompt_seconds: until the first token.  seconds: from the first token to the last.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    prompt_seconds: float
    seconds: float


@dataclass(frozen=True)
class Event:
    """What one step added to one sequence.

    index: of the sequence, in the order they were given.  text: may be empty.  tokens: ids.
    result: the whole, with a sequence's last event; else None.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    result: Result | None = None

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length" with a sequence's last event, else None."""
        return self.result and self.result.finish_reason


def generate(model, prompts, *, stream: bool = False, **options) -> Result | list[Result] | Iterator[Event]:
    """Continue prompts, all in one running batch.

    prompts: a text, token ids (a list or a tensor), or a list of either. Texts are continued as they are:
        for chat models see `chat`.
    options: fields of SamplingParams, by default what the checkpoint says.
    Returns the Result of one prompt, or a list of them in the order of a list of prompts; with `stream`, an iterator of
    Events as they come. InputError if a prompt is empty, does not fit into the context, or an option is wrong.
    """
    engine = Engine.of(model)
    params = sampling_params(model.artifact.path, **options)
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    for prompt in [prompts] if alone else prompts:
        engine.add(encode(model.tokenizer, prompt), params)
    if stream:
        return engine.run()
    results = {event.index: event.result for event in engine.run() if event.result}
    return results[0] if alone else [results[index] for index in sorted(results)]


def chat(model, messages, *, system: str | None = None, stream: bool = False, **options) -> Result | Iterator[Event]:
    """Answer a conversation, by the model's chat template.

    messages: a user's text, or a list of {"role", "content"}.  system: a system prompt to put in front.
    options, `stream` and errors: as for `generate`; and InputError if there is no template.
    """
    ids = chat_template.render(model.tokenizer, chat_template.as_messages(messages, system))
    return generate(model, ids, stream=stream, **options)


@dataclass(eq=False)
class _Sequence:
    """limit: tokens of prompt and answer at most.  done: tokens that are in the cache, at `blocks` and in the states at
    `slot`, which only an active sequence has."""

    index: int
    tokens: list[int]
    prompt: int
    limit: int
    sampler: Sampler
    text: TextStream
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of the start, of the first token, of the last one."""


class Engine:
    """Runs sequences over one decoder and one cache.

    tokenizer: transformers' tokenizer, or None: events then have no text.  end_tokens: ids that end a sequence.
    max_active: sequences in the batch at most.  step_tokens: new tokens of one step at most.  block_size: of the cache.
    """

    def __init__(
        self,
        decoder,
        tokenizer=None,
        end_tokens=frozenset(),
        max_active=MAX_ACTIVE,
        step_tokens=STEP_TOKENS,
        block_size=64,
    ):
        self._decoder, self._tokenizer, self._end_tokens = decoder, tokenizer, end_tokens
        self._max_active, self._step_tokens, self._block_size = max_active, step_tokens, block_size
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []
        self._added = 0
        self._cache, self._blocks, self._may_grow = None, 0, True
        self._graphs = Graphs.of(decoder)

    @classmethod
    def of(cls, model) -> Engine:
        """An engine for a PackedModel, with all the end tokens its files name."""
        return cls(model.decoder, model.tokenizer, end_tokens(model.artifact.path, model.tokenizer))

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a sequence; its index in events. InputError if it is empty, too long, or leaves the vocabulary."""
        spec = self._decoder.spec
        self._check(prompt, params)
        limit = min(len(prompt) + (params.max_new_tokens or spec.context), spec.context)
        sampler = Sampler(params, prompt, spec.vocab, self._decoder.device)
        text = TextStream(self._tokenizer, prompt, params.stop)
        self._waiting.append(_Sequence(self._added, list(prompt), len(prompt), limit, sampler, text))
        self._added += 1
        return self._added - 1

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        spec = self._decoder.spec
        if not prompt:
            raise InputError("The prompt is empty: give at least one token.")
        if len(prompt) >= spec.context:
            raise InputError(
                f"The prompt has {len(prompt)} tokens, but the model's context is {spec.context} tokens for prompt and "
                "answer together: shorten it."
            )
        if outside := [t for t in prompt if not 0 <= t < spec.vocab]:
            raise InputError(f"Token id {outside[0]} is not in the model's vocabulary of {spec.vocab}.")
        if params.stop and self._tokenizer is None:
            raise InputError("Stop strings need a tokenizer, and this artifact has none.")

    def run(self) -> Iterator[Event]:
        """Steps until every sequence is finished."""
        while self._waiting or self._active:
            yield from self.step()

    def step(self) -> list[Event]:
        """One forward pass: at most one token for each active sequence."""
        for s in list(self._active):
            self._extend(s)
        self._admit()
        batch = self._next_tokens()
        logits = self._forward(batch)
        for s, new in batch:
            s.done += len(new)
        ready = [row for row, (s, _) in enumerate(batch) if s.done == len(s.tokens)]
        if not ready:
            return []
        sequences = [batch[row][0] for row in ready]
        wanted = logits if len(ready) == len(batch) else logits[ready]
        tokens = sample(wanted, [s.sampler for s in sequences])
        return [self._accept(s, token) for s, token in zip(sequences, tokens)]

    def _forward(self, batch: list[tuple[_Sequence, list[int]]]) -> torch.Tensor:
        """float32 [S, vocab]: logits after the last new token of each sequence."""
        new, past, tables, slots = zip(*((new, s.done, s.blocks, s.slot) for s, new in batch))
        logits = None
        if self._graphs and all(len(ids) == 1 for ids in new):
            logits = self._graphs.forward([ids[0] for ids in new], past, tables, slots)
        if logits is not None:
            return logits
        return self._decoder.forward(Batch.build(new, past, tables, self._decoder.device, slots=slots), self._cache)

    def _extend(self, s: _Sequence) -> None:
        """See to it that an active sequence has a block for its last token, or that it waits."""
        while s in self._active and self._count(len(s.tokens)) > len(s.blocks):
            if self._cache.free_blocks:
                s.blocks += self._cache.allocate(1)
            elif self._may_grow:
                self._grow()
            else:
                self._put_back(self._active[-1:])  # the youngest, so that the oldest always finishes

    def _admit(self) -> None:
        """Let waiting sequences in, in order, while there are places, and blocks for all the tokens that they have."""
        while self._waiting and len(self._active) < self._max_active:
            s = self._waiting[0]
            need = self._count(len(s.tokens))
            if not self._active and (self._cache is None or need > self._cache.free_blocks):
                self._grow()
            if need > self._cache.free_blocks or not self._take_slot(s):
                return
            s.blocks = self._cache.allocate(need)
            s.times = s.times or [time.perf_counter()]
            self._active.append(self._waiting.popleft())

    def _take_slot(self, s: _Sequence) -> bool:
        """Whether there is one for its states. ResourceError if there is none although nobody else is active."""
        try:
            s.slot = self._cache.allocate_slot()
        except ResourceError:
            if not self._active:
                raise
            return False
        return True

    def _next_tokens(self) -> list[tuple[_Sequence, list[int]]]:
        """What each sequence runs in this step.

        Prompts run in the order of `_active`, so those that generate stand before all that still have a prompt to run.
        """
        room, batch = self._step_tokens, []
        for s in self._active:
            new = s.tokens[s.done : s.done + room]
            if new:
                batch.append((s, new))
                room -= len(new)
        return batch

    def _put_back(self, sequences: list[_Sequence]) -> None:
        """Free what active sequences hold. They wait in front of all others, and are computed again."""
        for s in reversed(sequences):
            self._release(s)
            s.done = 0
            self._waiting.appendleft(s)

    def _release(self, s: _Sequence) -> None:
        self._cache.free(s.blocks)
        self._cache.free_slot(s.slot)
        s.blocks, s.slot = [], None
        self._active.remove(s)

    def _grow(self) -> None:
        """A larger cache, or as large a one as fits. Nothing is active then.

        ResourceError if it does not even hold what the first sequence has. The old cache is given up before the new one
        is made, for together they might not fit.
        """
        self._put_back(list(self._active))
        least = max(self._blocks, self._count(len(self._waiting[0].tokens)))
        wanted = max(least, min(self._demand(), max(2 * self._blocks, self._first_size())))
        self._cache = None
        if self._graphs:
            self._graphs.unbind()
        while self._cache is None:
            try:
                self._cache = self._new_cache(wanted)
            except ResourceError:
                if wanted == least:
                    raise
                self._may_grow = False
                wanted = max(least, wanted // 2)
        self._blocks = wanted

    def _new_cache(self, blocks: int):
        """Of blocks for sequences, and the one that graphs need."""
        if not self._graphs:
            return self._decoder.new_cache(blocks, self._block_size)
        cache = self._decoder.new_cache(blocks + 1, self._block_size)
        self._graphs.bind(cache, min(blocks, self._count(self._decoder.spec.context)))
        return cache

    def _demand(self) -> int:
        """Blocks that the next waiting sequences can come to hold together."""
        return sum(self._count(s.limit) for s in self._candidates())

    def _first_size(self) -> int:
        """Blocks that they hold soon. A CPU's untouched memory is free, so there one of them has all it can need."""
        soon = [self._count(min(s.limit, len(s.tokens) + HEADROOM)) for s in self._candidates()]
        on_cpu = torch.device(self._decoder.device).type == "cpu"
        return max(sum(soon), max(self._count(s.limit) for s in self._candidates()) if on_cpu else 0)

    def _candidates(self) -> list[_Sequence]:
        return list(islice(self._waiting, self._max_active))

    def _count(self, tokens: int) -> int:
        """Blocks for that many tokens."""
        return -(-tokens // self._block_size)

    def _accept(self, s: _Sequence, token: int) -> Event:
        """Add a sampled token to its sequence, and end it if it is time."""
        if token < 0:
            raise InputError(
                f"The model computed no finite logits for token {len(s.tokens)}: check the artifact with "
                "`tutel-convert verify`, or compute in another dtype."
            )
        s.tokens.append(token)
        s.times = [*s.times[:2], time.perf_counter()]
        ended = token in self._end_tokens
        piece = "" if ended else s.text.push(token)
        done = ended or s.text.stopped or len(s.tokens) == s.limit
        s.pieces.append(piece + s.text.finish() if done else piece)
        if not done:
            return Event(s.index, s.pieces[-1], (token,))
        self._release(s)
        return Event(s.index, s.pieces[-1], (token,), self._result(s, "stop" if ended or s.text.stopped else "length"))

    def _result(self, s: _Sequence, reason: str) -> Result:
        start, first, last = s.times[0], s.times[1], s.times[-1]
        return Result("".join(s.pieces), s.tokens[s.prompt :], reason, s.prompt, first - start, last - first)
