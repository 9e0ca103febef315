"""Laws of attention to latents: within twice the bound where they reorder sums, else to the bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import rounding
from torch_ops.testing.laws import in_range, safe_exponents, scaled_pair
from torch_ops.testing.proof import Arguments, Law, Pair, Trial
from torch_ops.testing.proofs._latents import FORM
from torch_ops.testing.proofs._paged_laws import MOVED_PAGES, ONE_PAGE
from torch_ops.testing.proofs._ragged_laws import (
    ALONE,
    SEQUENCES,
    UNREAD,
    Pairs,
    close,
    equal,
    finite,
    law,
    on_cpu,
    read,
)


def _in_range(trial: Trial, query: str, cache: str) -> bool:
    parts = trial.args[query], read(FORM, trial, cache)
    return all(in_range(part, *safe_exponents(part.dtype)) for part in parts)


def _negated(trial: Trial) -> Pairs:
    """Logits stay, and values change their sign."""
    got = trial.run(**{n: -trial.args[n] for n in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")})
    return equal("all negated", got, [-trial.outputs[0]])


def _scaled_latents(trial: Trial) -> Pairs:
    if not _in_range(trial, "q_nope", "ckv_cache"):
        return None
    args = trial.args
    (got,) = trial.run(q_nope=args["q_nope"] / 8, ckv_cache=args["ckv_cache"] * 8)
    return [scaled_pair("out, latents times 8", got, trial.outputs[0], 3)]


def _moved_scale(trial: Trial) -> Pairs:
    if not _in_range(trial, "q_pe", "kpe_cache"):
        return None
    args = trial.args
    got = trial.run(q_pe=args["q_pe"] * 8, kpe_cache=args["kpe_cache"] / 8)
    return equal("8 q_pe and kpe / 8", got, trial.outputs)


def _first_tokens(args: Arguments) -> tuple[Arguments, Tensor]:
    """The table of the first token of each sequence, and which sequences have one."""
    bounds = args["kv_indptr"].long()
    some = bounds[1:] > bounds[:-1]
    table = {
        "kv_indptr": torch.cat([bounds[:1], some.cumsum(0)]).int(),
        "kv_indices": args["kv_indices"][bounds[:-1][some]],
        "kv_last_page_len": torch.ones_like(args["kv_last_page_len"]),
    }
    return table, some


def _one_key(trial: Trial) -> Pairs:
    """The weight of one key is 1: its latent comes out, to the last bit in narrow dtypes.

    A weight and the sum of weights err by what a logit errs, ``r``, at most: a latent times
    1 + r is rounded back to it where r is less than half of the unit roundoff.
    """
    args = trial.args
    table, some = _first_tokens(args)
    pages = table["kv_indices"].long()
    key = {n: args[n][pages, 0].double() for n in ("ckv_cache", "kpe_cache")}
    q = {n: args[n][some].double() for n in ("q_nope", "q_pe")}
    if not len(pages) or not all(bool(x.isfinite().all()) for x in (*key.values(), *q.values())):
        return None
    (got,) = trial.run(**table)
    expected = torch.zeros_like(got)
    expected[some] = args["ckv_cache"][pages, :1].expand(expected[some].shape)
    terms = zip(q.values(), key.values(), strict=True)
    size = torch.stack([(x.abs() @ k.abs().unsqueeze(-1)).squeeze(-1) for x, k in terms]).sum(0)
    unit, width = rounding(got.dtype), sum(x.shape[-1] for x in q.values())
    error = torch.expm1(2 * unit.acc * (width**0.5 + 2) * abs(args["scale"]) * size)
    bound = None
    if got.dtype in (torch.float32, torch.float64) or bool((error > unit.u / 4).any()):
        bound = FORM.oracle(on_cpu({**args, **table}), trial.contract)[0].bound
    return [Pair("out of one key each", got, expected, bound)]


def _constant_latents(trial: Trial) -> Pairs:
    """A convex combination of one latent is that latent."""
    latents = torch.full_like(trial.args["ckv_cache"], 0.75)
    if not finite(FORM, trial, *FORM.queries, FORM.keys):
        return None
    (got,) = trial.run(ckv_cache=latents)
    expected = torch.zeros_like(got)
    for run in FORM.runs(trial.args):
        expected[run.rows] = 0.75 if len(run.keys[0]) else 0.0
    changed = {**on_cpu(trial.args), "ckv_cache": latents.cpu()}
    bound = FORM.oracle(changed, trial.contract)[0].bound
    return [Pair("out of constant latents", got, expected, bound)]


def _heads(trial: Trial) -> Pairs:
    """In reverse order, and the last of them without the others."""
    count = trial.args["q_nope"].shape[1]
    if count < 2:
        return None
    pairs: list[Pair] = []
    for what, heads in (
        ("heads reversed", [*range(count)][::-1]),
        ("some heads alone", [*range(count - count // 2, count)]),
    ):
        found = trial.run(**{n: trial.args[n][:, heads] for n in FORM.queries})
        base = [output[:, heads] for output in trial.outputs]
        pairs += close(trial, what, found, base, _taking(heads))
    return pairs


def _taking(heads: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda bound: bound[:, heads]


LAWS = (
    Law("negated", "f(-q, -ckv, -kpe) == -f(q, ckv, kpe)", _negated),
    Law("scaled_latents", "f(q_nope / 8, 8 ckv) == 8 f(q_nope, ckv)", _scaled_latents),
    Law("moved_scale", "f(8 q_pe, kpe / 8) == f(q_pe, kpe)", _moved_scale),
    Law("one_key", "with one key, f is its latent", _one_key),
    Law("constant_latents", "where all latents are alike, f is that latent", _constant_latents),
    Law("heads", "heads don't know each other", _heads),
    *(law(FORM, *parts) for parts in (UNREAD, SEQUENCES, MOVED_PAGES, ONE_PAGE)),
    law(FORM, *ALONE, declared="batch_invariant"),
)
