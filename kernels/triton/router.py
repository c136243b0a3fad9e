"""The choice of experts: a program for each token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + eˣ). The quotient makes up for what 1 + e loses of a small e."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _scores(x, inside, SCORE: tl.constexpr):
    if SCORE == "softmax":
        e = tl.where(inside, tl.exp(x - tl.max(x)), 0.0)
        return e / tl.sum(e)
    elif SCORE == "sigmoid":
        return tl.sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        return tl.sqrt(_softplus(x))
    else:
        return x


@triton.jit
def _in_best_groups(choice, TOP_GROUPS: tl.constexpr, ONE: tl.constexpr):
    """choice [G, S], −∞ outside the groups whose two best sum to most. ONE: groups have one member."""
    G: tl.constexpr = choice.shape[0]
    S: tl.constexpr = choice.shape[1]
    group, member = tl.arange(0, G), tl.arange(0, S)[None, :]
    best = tl.max(choice, axis=1)
    if not ONE:
        where = tl.min(tl.where(choice == best[:, None], member, S), axis=1)
        best += tl.max(tl.where(member == where[:, None], -float("inf"), choice), axis=1)
    kept = tl.zeros((G,), tl.int1)
    for _ in range(TOP_GROUPS):
        largest = tl.max(tl.where(kept, -float("inf"), best))
        kept |= group == tl.min(tl.where((best == largest) & (kept == 0), group, G))
    return tl.where(kept[:, None], choice, -float("inf"))


@triton.jit
def route(
    logits, correction, ids, weights, experts, size, scale, epsilon,
    SCORE: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """ids int64 [T, TOP_K] and weights float32 of it, from logits [T, experts]; see spec.Router.

    The experts are GROUPS × size, in a tile of G × S; K places for the chosen: powers of two. Of equal choices the
    smaller id comes first; NaN counts as the largest.
    """
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    expert = group * size + member
    inside = (group < GROUPS) & (member < size)
    x = tl.load(logits + token * experts + expert, mask=inside, other=-float("inf")).to(tl.float32)
    score = _scores(x, inside, SCORE)
    choice = score
    if correction is not None:
        choice += tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)
    choice = tl.where(inside, choice, -float("inf"))
    if TOP_GROUPS < GROUPS:
        choice = _in_best_groups(choice, TOP_GROUPS, S == 1)
    place = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.int64)
    weight = tl.full((K,), -float("inf") if SCORE == "softmax_chosen" else 0.0, tl.float32)
    free = inside
    for j in range(TOP_K):
        largest = tl.max(tl.where(free, choice, -float("inf")))
        best = tl.min(tl.where(free & (choice == largest), expert, experts))
        free &= expert != best
        chosen = tl.where(place == j, best.to(tl.int64), chosen)
        weight = tl.where(place == j, tl.sum(tl.where(expert == best, score, 0.0)), weight)
    if SCORE == "softmax_chosen":
        weight = tl.exp(weight - tl.max(weight))
        weight /= tl.sum(weight)
    if RENORMALIZE:
        weight /= tl.maximum(tl.sum(weight), epsilon)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, weight * scale, mask=place < TOP_K)
