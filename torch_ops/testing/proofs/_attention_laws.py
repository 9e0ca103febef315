"""Laws of attention. The output comes first; an LSE, where there is one, second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_ops.testing.laws import alone, in_range, safe_exponents, scaled_pair, twice
from torch_ops.testing.proof import Law, Output, Pair, Trial
from torch_ops.testing.proofs._attention import attend, visible

_NAMES = ("out", "lse")


def _all(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [
        Pair(f"{name}, {what}", a, b)
        for name, a, b in zip(_NAMES[: len(got)], got, expected, strict=True)
    ]


def _finite(trial: Trial, *names: str) -> bool:
    return all(bool(trial.args[n].isfinite().all()) for n in names)


def _negated_values(trial: Trial) -> Sequence[Pair]:
    got = trial.run(v=-trial.args["v"])
    return _all("values negated", got, (-trial.outputs[0], *trial.outputs[1:]))


def _scaled_values(trial: Trial) -> Sequence[Pair] | None:
    v = trial.args["v"]
    if not in_range(v, *safe_exponents(v.dtype)):
        return None
    got = trial.run(v=v * 8)
    return [
        scaled_pair("out, values times 8", got[0], trial.outputs[0], 3),
        *_all("values times 8", got, trial.outputs)[1:],
    ]


def _moved_scale(trial: Trial) -> Sequence[Pair] | None:
    """Products are the same bits; sums of them are too."""
    q, k = trial.args["q"], trial.args["k"]
    if not all(in_range(t, *safe_exponents(t.dtype)) for t in (q, k)):
        return None
    return _all("8 q and k / 8", trial.run(q=q * 8, k=k / 8), trial.outputs)


def _negated_logits(trial: Trial) -> Sequence[Pair]:
    got = trial.run(q=-trial.args["q"], k=-trial.args["k"])
    return _all("q and k negated", got, trial.outputs)


def _unseen_keys(trial: Trial) -> Sequence[Pair] | None:
    """Finite garbage at keys that no query attends to, or only later ones, changes nothing."""
    k, v = trial.args["k"], trial.args["v"]
    queries, keys = trial.args["q"].shape[1], k.shape[1]
    seen = visible(queries, keys, trial.args["is_causal"], trial.args["window_left"])
    rows = _rows_to_keep(seen)
    if rows is None or not _finite(trial, "k", "v"):
        return None
    hidden = ~seen[rows].any(0)
    where = hidden.view(1, -1, 1, 1).to(k.device)
    got = trial.run(
        k=torch.where(where, torch.full_like(k, 3.0), k),
        v=torch.where(where, torch.full_like(v, -7.0), v),
    )
    kept = [o[:, rows] for o in got], [o[:, rows] for o in trial.outputs]
    return _all("keys it can't see changed", *kept)


def _rows_to_keep(seen: Tensor) -> list[int] | None:
    """Half of the queries, such that some key is hidden from all of them."""
    count = seen.shape[0]
    for rows in (range((count + 1) // 2), range(count // 2, count)):
        if len(rows) and bool((~seen[list(rows)].any(0)).any()):
            return list(rows)
    return None


def _masked_weight(trial: Trial) -> Sequence[Pair] | None:
    """With V the identity the output is P: masked entries are exactly zero."""
    q, k = trial.args["q"], trial.args["k"]
    keys = k.shape[1]
    seen = visible(q.shape[1], keys, trial.args["is_causal"], trial.args["window_left"])
    if bool(seen.all()) or not _finite(trial, "q", "k"):
        return None
    eye = torch.eye(keys, dtype=q.dtype, device=q.device)
    (p, *_) = trial.run(v=eye.view(1, keys, 1, keys).repeat(q.shape[0], 1, k.shape[2], 1))
    zero = torch.where(seen.view(1, q.shape[1], 1, keys).to(p.device), torch.zeros_like(p), p)
    return [Pair("weights of masked keys", zero, torch.zeros_like(p))]


def _constant_values(trial: Trial) -> Sequence[Pair] | None:
    """A convex combination of one value is that value: in narrow dtypes to the last bit."""
    q = trial.args["q"]
    v = torch.full_like(trial.args["v"], 0.75)
    seen = visible(q.shape[1], v.shape[1], trial.args["is_causal"], trial.args["window_left"]).any(
        -1
    )
    (got, *_) = trial.run(v=v)
    expected = torch.where(seen.view(1, -1, 1, 1).to(got.device), 0.75, 0.0).to(got.dtype)
    bound = None
    if q.dtype in (torch.float32, torch.float64) or trial.contract.p_dtype == "input":
        bound = attend({**_on_cpu(trial), "v": v.cpu()}, trial.contract)[0].bound
    return [Pair("out of constant values", got, expected.expand(got.shape), bound)]


def _on_cpu(trial: Trial) -> dict[str, object]:
    return {n: a.cpu() if isinstance(a, Tensor) else a for n, a in trial.args.items()}


def _reordered(
    trial: Trial, what: str, changed: dict[str, Tensor], reorder: Callable[[Tensor], Tensor]
) -> list[Pair]:
    """Compare after a reordering: bit for bit where batch invariance is declared.

    Elsewhere within twice the bound: a batched product may treat its last matrices otherwise.
    """
    got = trial.run(**changed)
    bounds: list[Tensor | None] = [None] * len(got)
    if not trial.contract.batch_invariant:
        on_cpu = {name: tensor.cpu() for name, tensor in changed.items()}
        expected = attend({**_on_cpu(trial), **on_cpu}, trial.contract)
        bounds = [twice(e.bound) for e in expected]
    return [
        Pair(f"{name}, {what}", a, reorder(b), bound)
        for name, a, b, bound in zip(_NAMES, got, trial.outputs, bounds, strict=False)
    ]


def _swapped_batch(trial: Trial) -> Sequence[Pair] | None:
    if trial.args["q"].shape[0] < 2:
        return None
    changed = {n: trial.args[n].flip(0).contiguous() for n in ("q", "k", "v")}
    pairs = _reordered(trial, "sequences reversed", changed, lambda o: o.flip(0))
    return pairs + _next_to_nan(trial)


def _next_to_nan(trial: Trial) -> list[Pair]:
    """The first sequence where all others have keys and values NaN, which no zero weight undoes."""
    changed = {n: trial.args[n].clone() for n in ("k", "v")}
    for value in changed.values():
        value[1:] = torch.nan
    kept = [o[:1] for o in trial.run(**changed)], [o[:1] for o in trial.outputs]
    return _all("the other sequences NaN", *kept)


def _swapped_heads(trial: Trial) -> Sequence[Pair] | None:
    """Reversing key heads, and with them the groups of query heads, reverses the output."""
    q, k, v = (trial.args[n] for n in ("q", "k", "v"))
    if k.shape[2] < 2:
        return None

    def grouped(x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(2, (k.shape[2], -1))
        return parts.flip(2).flatten(2, 3).contiguous()

    changed = {"q": grouped(q), "k": k.flip(2).contiguous(), "v": v.flip(2).contiguous()}
    return _reordered(trial, "heads reversed", changed, grouped)


def _repeated_heads(trial: Trial) -> Sequence[Pair] | None:
    """Grouped queries against as many key heads, each repeated: within twice the bound."""
    q, k, v = (trial.args[n] for n in ("q", "k", "v"))
    group = q.shape[2] // k.shape[2]
    if group < 2:
        return None
    got = trial.run(k=k.repeat_interleave(group, 2), v=v.repeat_interleave(group, 2))
    expected = attend(_on_cpu(trial), trial.contract)
    return [
        Pair(f"{e.name}, key heads repeated", a, b, twice(e.bound))
        for e, a, b in zip(expected, got, trial.outputs, strict=False)
    ]


def _split_keys(trial: Trial) -> Sequence[Pair] | None:
    """Two halves of the keys, each attended to alone, merged by their LSEs in float64.

    The merged output errs by what both parts err, weighted, and by what errors d of the LSEs move
    the weights: ``sum w_i b_i + expm1(2 d) sum w_i |o_i|``; the merged LSE errs by d.
    """
    keys = trial.args["k"].shape[1]
    if keys < 2 or trial.args["is_causal"] or trial.args["window_left"] >= 0:
        return None
    found, expected = [], []
    for part in (slice(0, keys // 2), slice(keys // 2, None)):
        changed = {n: trial.args[n][:, part].contiguous() for n in ("k", "v")}
        found.append([output.cpu().double() for output in trial.run(**changed)])
        on_cpu = {name: tensor.cpu() for name, tensor in changed.items()}
        expected.append(attend({**_on_cpu(trial), **on_cpu}, trial.contract))
    lse = torch.logaddexp(found[0][1], found[1][1])
    weights = torch.stack([torch.exp(s - lse).unsqueeze(-1) for _, s in found])
    parts = torch.stack([o for o, _ in found])
    off = torch.stack([_bound(e[1]) for e in expected]).amax(0)
    moved = torch.expm1(2 * off).unsqueeze(-1) * (weights * parts.abs()).sum(0)
    errors = (weights * torch.stack([_bound(e[0]) for e in expected])).sum(0)
    whole = attend(_on_cpu(trial), trial.contract)
    values = ((weights * parts).sum(0), lse), (errors + moved, off)
    return [
        Pair(f"{name}, of halves of the keys merged", got.cpu().double(), value, bound + _bound(e))
        for name, got, value, bound, e in zip(_NAMES, trial.outputs, *values, whole, strict=True)
    ]


def _bound(output: Output) -> Tensor:
    assert output.bound is not None
    return output.bound


SPLIT_KEYS = Law("split_keys", "f(k, v) is the merge of f over parts of the keys", _split_keys)
LAWS = (
    Law("negated_values", "f(q, k, -v) == -f(q, k, v)", _negated_values),
    Law("scaled_values", "f(q, k, 8 v) == 8 f(q, k, v)", _scaled_values),
    Law("moved_scale", "f(8 q, k / 8, v) == f(q, k, v)", _moved_scale),
    Law("negated_logits", "f(-q, -k, v) == f(q, k, v)", _negated_logits),
    Law("unseen_keys", "a query doesn't depend on keys that it can't see", _unseen_keys),
    Law("masked_weight", "with V = 1, masked weights are exactly 0", _masked_weight),
    Law("constant_values", "f(q, k, c) == c", _constant_values),
    Law("sequences", "sequences of a batch don't know each other", _swapped_batch),
    alone(("q", "k", "v")),
    Law("heads", "heads don't know each other", _swapped_heads),
    Law("repeated_heads", "grouped queries are queries with repeated key heads", _repeated_heads),
)
