"""From logits to the next tokens: parameters of a generation, and a sampler that works on all rows of a batch at once.

The filters apply in transformers' order: repetition penalty, temperature, top-k, top-p, min-p. Each is a threshold on
probabilities, and the token is drawn in the order of token ids, so a row's token depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tutel_pack.errors import InputError

COLDEST = 1e-3
"""Temperatures below it are greedy: logits that differ by less are equal within the error of their own computation."""
NUCLEUS = 1024
"""How many of the most probable tokens are ranked first for top-p; the whole vocabulary only when they fall short."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are chosen, and when it ends.

    temperature: divides the logits; 0 is greedy.
    top_k: only the k most probable tokens, and those tied with the last; 0 is all.
    top_p: only the fewest most probable tokens whose probabilities add up to top_p; 0 is the top token, 1 is all.
    min_p: only tokens at least min_p times as probable as the top token; 0 is all.
    repetition_penalty: logits of tokens seen in prompt or answer are divided by it, negative ones multiplied.
    seed: of this sequence's own random numbers; None is a new one every time.
    max_new_tokens: None generates until the model ends the text or the context is full.
    stop: strings that end the text and are not part of it.
    InputError if a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        self._number("temperature", "0 or more", lambda v: 0 <= v < math.inf)
        self._number("top_k", "a whole number, 0 (all tokens) or more", lambda v: v >= 0, int)
        self._number("top_p", "between 0 and 1", lambda v: 0 <= v <= 1)
        self._number("min_p", "between 0 and 1", lambda v: 0 <= v <= 1)
        self._number("repetition_penalty", "more than 0", lambda v: 0 < v < math.inf)
        if self.seed is not None:
            self._number("seed", "a whole number, 0 or more", lambda v: v >= 0, int)
        if self.max_new_tokens is not None:
            self._number("max_new_tokens", "a whole number, 1 or more", lambda v: v >= 1, int)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError(f"stop must be strings that are not empty, not {self.stop!r}.")

    def _number(self, name: str, rule: str, holds, kind=(int, float)) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not holds(value):
            raise InputError(f"{name} must be {rule}, not {value!r}.")

    @property
    def greedy(self) -> bool:
        """Whether the top token is taken without a draw."""
        return self.temperature < COLDEST or self.top_k == 1 or self.top_p == 0


class Sampler:
    """What one sequence carries from token to token: its parameters, its random numbers, the tokens it has seen.

    prompt: token ids.  vocab: the number of logits.  device: of the logits.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab: int, device="cpu"):
        self.params = params
        self.random = Random(params.seed)
        self.seen = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.seen[list(prompt)] = True


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of R sequences from their float32 logits [R, V]; −1 for a row without a finite maximum."""
    logits = _penalised(logits, samplers)
    best, tokens = logits.max(-1)
    drawn = [row for row, s in enumerate(samplers) if not s.params.greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [samplers[row] for row in drawn])
    tokens = [token if math.isfinite(most) else -1 for most, token in zip(best.tolist(), tokens.tolist())]
    for sampler, token in zip(samplers, tokens):
        if sampler.seen is not None and token >= 0:
            sampler.seen[token] = True
    return tokens


def _penalised(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    rows = [row for row, s in enumerate(samplers) if s.seen is not None]
    if not rows:
        return logits
    part, seen = logits[rows], torch.stack([samplers[row].seen for row in rows])
    penalty = _column([samplers[row].params.repetition_penalty for row in rows], part)
    logits = logits.clone()
    logits[rows] = torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)
    return logits


def _draw(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """int64 [R], by inverting the cumulative distribution; float64, so that no token of a large vocabulary is lost."""
    logits, params = logits.double(), [s.params for s in samplers]
    probs = torch.softmax(logits / _column([p.temperature for p in params], logits), -1)
    probs = _top_k(probs, [p.top_k for p in params])
    probs = _top_p(probs, [p.top_p for p in params])
    probs = _min_p(probs, [p.min_p for p in params])
    cumulative = probs.cumsum(-1)
    point = _column([s.random.random() for s in samplers], probs) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


def _top_k(probs: Tensor, top_k: list[int]) -> Tensor:
    if not any(top_k):
        return probs
    ranked = probs.topk(min(max(top_k), probs.shape[-1])).values
    k = torch.tensor(top_k, device=probs.device)[:, None]
    smallest = ranked.gather(-1, k.clamp(1, ranked.shape[-1]) - 1)
    return _keep(probs, smallest.masked_fill(k == 0, 0))


def _top_p(probs: Tensor, top_p: list[float]) -> Tensor:
    if min(top_p) == 1:
        return probs
    share = _column(top_p, probs)
    mass = probs.sum(-1, keepdim=True)
    for width in (min(NUCLEUS, probs.shape[-1]), probs.shape[-1]):
        ranked = probs.topk(width).values
        cumulative = ranked.cumsum(-1)
        if bool(((cumulative[:, -1:] >= share * mass) | (share == 1)).all()):
            break
    # A token is needed while those before it do not yet add up to the share; the first always is.
    needed = (cumulative - ranked < share * mass).sum(-1, keepdim=True).clamp(min=1)
    return _keep(probs, ranked.gather(-1, needed - 1).masked_fill(share == 1, 0))


def _min_p(probs: Tensor, min_p: list[float]) -> Tensor:
    if not any(min_p):
        return probs
    return _keep(probs, _column(min_p, probs) * probs.amax(-1, keepdim=True))


def _keep(probs: Tensor, threshold: Tensor) -> Tensor:
    """Probabilities, not renormalised, with those below the row's threshold [R, 1] set to zero."""
    return probs.masked_fill(probs < threshold, 0)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
