"""Laws of rotating and appending at once: those of both ops, and those that only both have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_ops.testing.proof import Arguments, Law, Pair, Trial
from torch_ops.testing.proofs._append_faults import slots_of
from torch_ops.testing.proofs._rope_laws import LAWS as ROPE
from torch_ops.testing.proofs.append_paged_kv_ import CACHES
from torch_ops.testing.proofs.append_paged_kv_ import LAWS as APPEND

OUTPUTS = ("q", *CACHES)
ROWS = ("q", "k", "v", "positions", "slot_mapping")
ROTATED = ("zero_angle", "quarter_turn", "tail", "index_width", "pairing", "apart", "odd")
APPENDED = ("read_back", "untouched", "skipped")


def _as_rotation(trial: Trial) -> Trial:
    """Give what a law of apply_rope sees: each token has a slot, and keys are read from there."""
    names = ("q", "k", "cos_sin_cache", "positions", "is_neox")

    def call(args: Arguments) -> tuple[Tensor, ...]:
        q, k = args["q"], args["k"]
        count, heads, size = k.shape
        given = {
            "v": k.new_zeros(count, heads, 1),
            "k_cache": k.new_zeros(count, 1, heads, size),
            "v_cache": k.new_zeros(count, 1, heads, 1),
            "slot_mapping": torch.arange(count, device=k.device).flip(0),
        }
        rotated, keys, _ = trial.call({**trial.args, **args, **given, "q": q})
        return rotated, keys.squeeze(1).flip(0)

    args = {name: trial.args[name] for name in names}
    return replace(trial, args=args, outputs=call(args), call=call)


def _as_append(trial: Trial) -> Trial:
    """Give what a law of append_paged_kv_ sees: of keys, nothing is rotated."""
    names = ("k", "v", *CACHES, "slot_mapping")

    def call(args: Arguments) -> tuple[Tensor, ...]:
        k = args["k"]
        given = {
            "q": k[:, :0],
            "cos_sin_cache": trial.args["cos_sin_cache"][:, :0],
            "positions": torch.zeros_like(args["slot_mapping"]),
        }
        return trial.call({**trial.args, **args, **given})[1:]

    args = {name: trial.args[name] for name in names}
    return replace(trial, args=args, outputs=call(args), call=call)


def _lent(law: Law, of: str) -> Law:
    adapt = _as_rotation if of == "apply_rope" else _as_append
    statement = f"{of}: {law.statement}"
    return replace(law, statement=statement, pairs=lambda trial: law.pairs(adapt(trial)))


def _compared(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [Pair(f"{n}, {what}", a, b) for n, a, b in zip(OUTPUTS, got, expected, strict=True)]


def _two_ops(trial: Trial) -> Sequence[Pair]:
    args = trial.args
    angles = args["cos_sin_cache"], args["positions"], args["is_neox"]
    q, k = trial.other("apply_rope", args["q"].clone(), args["k"].clone(), *angles)
    caches = [args[name].clone() for name in CACHES]
    trial.other("append_paged_kv_", k, args["v"].clone(), *caches, args["slot_mapping"].clone())
    return _compared("two ops", trial.outputs, (q, *caches))


def _keys_as_queries(trial: Trial) -> Sequence[Pair] | None:
    page, offset, rows = slots_of(trial.args["slot_mapping"], trial.args["k_cache"].shape[1])
    if not len(rows):
        return None
    q, k_cache, _ = trial.run(q=trial.args["k"])
    return [
        Pair("keys rotated as queries", k_cache[page, offset], q[rows]),
        Pair("k_cache, keys as queries", k_cache, trial.outputs[1]),
    ]


def _slots_apart(trial: Trial) -> Sequence[Pair]:
    none = -1 - trial.args["slot_mapping"].abs()
    expected = trial.outputs[0], *(trial.args[name] for name in CACHES)
    return _compared("no slots", trial.run(slot_mapping=none), expected)


def _order(trial: Trial) -> Sequence[Pair] | None:
    if len(trial.args["slot_mapping"]) < 2:
        return None
    q, *caches = trial.run(**{name: trial.args[name].flip(0) for name in ROWS})
    return _compared("rows reversed", (q.flip(0), *caches), trial.outputs)


def _in_parts(trial: Trial) -> Sequence[Pair] | None:
    """Each row's angle and slot are its own: the number of rows of a call is nothing to it."""
    count = len(trial.args["slot_mapping"])
    if count < 2:
        return None
    caches: dict[str, Tensor] = {}
    queries = []
    for part in (slice(0, count // 2), slice(count // 2, None)):
        q, *written = trial.run(**{name: trial.args[name][part] for name in ROWS}, **caches)
        caches = dict(zip(CACHES, written, strict=True))
        queries.append(q)
    return _compared("in two calls", (torch.cat(queries), *caches.values()), trial.outputs)


LAWS = (
    Law("two_ops", "f == apply_rope, and append_paged_kv_ of its keys", _two_ops),
    Law("keys_as_queries", "a key is rotated as a query is", _keys_as_queries),
    Law("slots_apart", "without a slot queries are the same, and caches kept", _slots_apart),
    Law("order", "the order of rows is nothing to a cache", _order),
    Law("in_parts", "f(a, b) == f(b) after f(a)", _in_parts, declared="batch_invariant"),
    *(_lent(law, "apply_rope") for law in ROPE if law.name in ROTATED),
    *(_lent(law, "append_paged_kv_") for law in APPEND if law.name in APPENDED),
)
