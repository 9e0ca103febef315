"""Planted faults of attention over sequences: of dense attention, and of where sequences are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.faults import each, generic_mutants, last_bits
from torch_ops.testing.proof import Arguments, Mutant
from torch_ops.testing.proofs import _attention_faults as dense
from torch_ops.testing.proofs._attention import visible
from torch_ops.testing.proofs._ragged import Form, Run

Two = tuple[Tensor, Tensor]
Kernel = Callable[..., Two]
Where = Callable[[Arguments, list[Run]], list[Run]]
GENERIC = {mutant.name for mutant in generic_mutants(lambda *args: args[0])}
# Faults between the sequences of a dense batch, of which there is one here.
BATCHED = {
    "keys_of_sequence_0", "values_of_sequence_0", "queries_of_sequence_0",
    "next_values_times_zero",
    "fast_path_for_one_row", "fast_path_for_few_rows", "predicate_wants_several_rows",
}  # fmt: skip
# One query at the last key sees all keys but those before its window: none, or one at least.
OF_SEVERAL_QUERIES = {
    "causal_top_left", "causal_one_more", "causal_ignored", "mask_of_lowest", "empty_row_is_mean",
}  # fmt: skip


def ragged(
    form: Form,
    attend: Kernel | None = None,
    where: Where = lambda args, runs: runs,
    arguments: Callable[[Arguments], Arguments] = lambda args: args,
    padding: float = 0.0,
) -> Kernel:
    """Returns attention with its LSE, one sequence after the other, made of these pieces."""
    one = attend or dense.attention()

    def kernel(*values: Any) -> Two:
        args = arguments(dict(zip(form.arguments, values, strict=True)))
        q = args[form.queries[0]]
        out = q.new_full((*q.shape[:2], args[form.values].shape[-1]), padding)
        lse = torch.full(q.shape[:2], -torch.inf)
        for run in where(args, form.runs(args)):
            if run.rows.start < run.rows.stop:
                part = one(*form.one(args, run).values())
                out[run.rows], lse[run.rows] = part[0][0], part[1][0]
        return out, lse

    return kernel


def _from_first(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
    """The first query at the first key, causal or not."""
    square = max(queries, keys)
    return visible(square, square, is_causal, window_left)[:queries, :keys]


def _keys_moved(by: int) -> Where:
    """Keys that begin and end so many rows later, inside the tensor."""

    def moved(args: Arguments, runs: list[Run]) -> list[Run]:
        count = args["k"].shape[0]
        return [replace(r, keys=((r.keys[0] + by).clamp(max=count - 1),)) for r in runs]

    return moved


def _one_more_key(args: Arguments, runs: list[Run]) -> list[Run]:
    """The end taken for the last key: that of the next sequence, or padding."""
    count = args["k"].shape[0]
    return [
        replace(r, keys=(torch.cat([r.keys[0], r.keys[0][-1:] + 1]).clamp(max=count - 1),))
        for r in runs
    ]


def _keys_of_longest(args: Arguments, runs: list[Run]) -> list[Run]:
    """As many keys as the longest sequence has, for each."""
    found = []
    for run, first in zip(runs, args["kv_indptr"].tolist(), strict=False):
        end = min(first + args["max_kv_len"], args["k"].shape[0])
        found.append(replace(run, keys=(torch.arange(first, end),)))
    return found


def _last_takes_padding(args: Arguments, runs: list[Run]) -> list[Run]:
    """The last sequence goes on to the end of the queries."""
    end = len(args["q"])
    return [*runs[:-1], replace(runs[-1], rows=slice(runs[-1].rows.start, end))] if runs else []


def _of_sequence_0(args: Arguments, runs: list[Run]) -> list[Run]:
    return [replace(run, keys=runs[0].keys) for run in runs]


def _of_next(args: Arguments, runs: list[Run]) -> list[Run]:
    """The keys of the sequence behind, as after an empty one that isn't counted."""
    return [
        replace(run, keys=other.keys) for run, other in zip(runs, runs[1:] + runs[:1], strict=True)
    ]


def _without_empty(args: Arguments, runs: list[Run]) -> list[Run]:
    """Sequences without keys are left out of the count of sequences."""
    keys = [run.keys for run in runs if len(run.keys[0])]
    keys += [run.keys for run in runs if not len(run.keys[0])]
    return [replace(run, keys=index) for run, index in zip(runs, keys, strict=True)]


def _in_blocks(size: int) -> Where:
    """Keys behind the last whole block of a split are left out."""

    def whole(args: Arguments, runs: list[Run]) -> list[Run]:
        def cut(run: Run) -> Run:
            count = max(len(run.keys[0]) // size * size, 1)
            return replace(run, keys=tuple(part[:count] for part in run.keys))

        return [cut(run) for run in runs]

    return whole


def _rows_cut(args: Arguments, runs: list[Run]) -> list[Run]:
    """One row fewer than the largest length says."""
    most = max(args["max_qo_len"] - 1, 0)
    return [
        replace(r, rows=slice(r.rows.start, min(r.rows.stop, r.rows.start + most))) for r in runs
    ]


def _only_exact(args: Arguments, runs: list[Run]) -> list[Run]:
    """Lengths taken from the bound on them, where that isn't the longest sequence's."""
    longest = max((len(run.keys[0]) for run in runs), default=0)
    return runs if args["max_kv_len"] == longest else _keys_of_longest(args, runs)


def _by_tiles_of_bound(args: Arguments, runs: list[Run]) -> list[Run]:
    """A split count from the largest length, whose last part is dropped."""
    parts = args["max_kv_len"] // 4 + 1

    def cut(run: Run) -> Run:
        count = -(-len(run.keys[0]) // parts)
        return replace(run, keys=(run.keys[0][: max(count, 1) * (parts - 1)],))

    return [cut(run) for run in runs]


def _counted_from_row_0(form: Form) -> Kernel:
    """A query stands where its row in the packed tensor does."""

    def kernel(*values: Any) -> Two:
        args = dict(zip(form.arguments, values, strict=True))
        starts = iter([run.rows.start for run in form.runs(args) if run.rows.start < run.rows.stop])

        def mask(queries: int, keys: int, is_causal: bool, window_left: int) -> Tensor:
            place = torch.arange(queries).unsqueeze(1) + next(starts)
            key = torch.arange(keys).unsqueeze(0)
            seen = key <= place if is_causal else torch.ones(queries, keys, dtype=torch.bool)
            return seen & (key >= place - window_left) if window_left >= 0 else seen

        return ragged(form, dense.attention(mask=mask))(*values)

    return kernel


def out_only(kernel: Kernel) -> Callable[..., Tensor]:
    """The kernel without its LSE."""
    return lambda *args: kernel(*args)[0]


def both(kernel: Kernel) -> Kernel:
    """The kernel as it is."""
    return kernel


def planter(form: Form, convert: Callable[[Kernel], Any]) -> Callable[..., Mutant]:
    """A maker of mutants, from a name, the layers that find it, and the pieces that are wrong."""

    def mutant(name: str, kills: str, **pieces: Any) -> Mutant:
        return Mutant(name, tuple(kills.split()), convert(ragged(form, **pieces)))

    return mutant


def of_dense(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """The faults of dense attention, in each sequence."""
    without = GENERIC | BATCHED | (set() if "qo_indptr" in form.tables else OF_SEVERAL_QUERIES)
    return [
        Mutant(mutant.name, mutant.kills, convert(ragged(form, mutant.function)))
        for mutant in dense.mutants(both)
        if mutant.name not in without
    ]


def of_laws(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """The faults of dense attention that laws find, for the laws alone.

    That the bound finds all of them is shown once, where the LSE is returned too.
    """
    found = []
    for mutant in of_dense(form, convert):
        laws = tuple(layer for layer in mutant.kills if layer != "bound")
        if laws:
            found.append(replace(mutant, kills=laws))
    return found


def of_rows(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """Faults of where the queries of sequences are."""
    mutant = planter(form, convert)
    return [
        mutant("padding_is_the_last_sequence", "bound unread", where=_last_takes_padding),
        mutant("padding_isn_t_written", "bound", padding=torch.nan),
        Mutant("place_is_the_packed_row", ("bound", "later_queries", "sequences"),
               convert(_counted_from_row_0(form))),
        mutant("first_query_at_first_key", "bound later_queries",
               attend=dense.attention(mask=_from_first)),
        mutant("query_before", "bound later_queries",
               attend=dense.attention(q=lambda x: x.roll(1, 2))),
    ]  # fmt: skip


def _plus_zero_of_next(form: Form) -> Callable[[Arguments], Arguments]:
    values = form.values
    return lambda args: {**args, values: dense.times_zero_of_next(args[values])}


def of_batches(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """Faults that mix sequences up."""
    mutant = planter(form, convert)
    return [
        mutant("keys_of_sequence_0", "bound sequences", where=_of_sequence_0),
        mutant("keys_of_the_next", "bound sequences", where=_of_next),
        mutant("next_values_times_zero", "bound sequences", arguments=_plus_zero_of_next(form)),
        mutant("empty_sequences_uncounted", "bound sequences", where=_without_empty),
        mutant("keys_in_whole_blocks", "bound", where=_in_blocks(16)),
        *_of_promises(form, convert),
    ]


def _of_promises(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """Faults of kernels that promise not to count sequences."""
    right = convert(ragged(form))

    def count(values: Sequence[Any]) -> int:
        return len(form.runs(dict(zip(form.arguments, values, strict=True))))

    def few(limit: int) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            result = right(*values)
            return each(result, last_bits) if count(values) <= limit else result

        return call

    def several(*values: Any) -> Any:
        return right(*values)

    def supports(*values: Any) -> str | None:
        return "one sequence" if count(values) == 1 else None

    several.supports = supports  # type: ignore[attr-defined]
    law = ("batch_invariance",)
    return [
        Mutant("fast_path_for_one_sequence", law, few(1)),
        Mutant("fast_path_for_few_sequences", law, few(2)),
        Mutant("predicate_wants_several_sequences", law, several),
    ]


def of_packed(form: Form, convert: Callable[[Kernel], Any]) -> list[Mutant]:
    """Faults of packed keys and of the lengths that are named."""
    mutant = planter(form, convert)
    return [
        mutant("keys_off_by_one", "bound unread", where=_keys_moved(1)),
        mutant("one_key_more", "bound unread sequences", where=_one_more_key),
        mutant("keys_of_the_longest", "bound unread larger_bounds", where=_keys_of_longest),
        mutant("rows_of_the_longest_less_one", "bound larger_bounds", where=_rows_cut),
        mutant("lengths_of_an_inexact_bound", "larger_bounds", where=_only_exact),
        mutant("parts_of_the_bound", "bound larger_bounds", where=_by_tiles_of_bound),
    ]


def of_lse(form: Form) -> list[Mutant]:
    """The faults of dense attention that only the LSE shows."""
    return [
        Mutant(mutant.name, mutant.kills, ragged(form, mutant.function))
        for mutant in dense.lse_mutants()
    ]


def generic(form: Form, convert: Callable[[Kernel], Any]) -> Sequence[Mutant]:
    """Faults that fit every op."""
    return generic_mutants(convert(ragged(form)))
