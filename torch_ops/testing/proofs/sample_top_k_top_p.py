"""Proof of sample_top_k_top_p: the index that a row's random number falls on, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.batch_faults import row_by_row
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.laws import alone, in_range, permuted_rows
from torch_ops.testing.proof import Arguments, Law, Mutant, Output, Pair, Proof, Trial
from torch_ops.testing.proofs import _sampling as rows
from torch_ops.testing.proofs import _sampling_faults as faults

OP = "sample_top_k_top_p"
FORM = rows.Form(OP, {"k": "int32", "p": "float32", "seed": "int64", "offset": "int64"})
WORD = 2**32


def philox(key: int, counter: int) -> tuple[int, int]:
    """The first two of four numbers of Philox4x32-10, after Salmon et al. (SC 2011)."""
    a, b, c, d = counter % WORD, counter // WORD % WORD, 0, 0
    first, second = key % WORD, key // WORD % WORD
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            right // WORD ^ b ^ first, right % WORD, left // WORD ^ d ^ second, left % WORD,
        )  # fmt: skip
        first, second = (first + 0x9E3779B9) % WORD, (second + 0xBB67AE85) % WORD
    return a, b


def uniforms(seed: Tensor, offset: Tensor) -> Tensor:
    """A number in [0, 1) for each row, of 31 bits of each of two words."""
    pairs = [philox(s, c) for s, c in zip(seed.tolist(), offset.tolist(), strict=True)]
    numbers = [((a >> 1) * 2**31 + (b >> 1)) / 2**62 for a, b in pairs]
    return torch.tensor(numbers, dtype=torch.float64)


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The first index, of what both filters keep, up to which there is more than u of the mass.

    In float64 sums of a row err by less than 2^-35 of it, and those of a kernel by less than 2^-26,
    so that by chance an index is in doubt in one of 5e7 rows.
    """
    rows.agreed(contract, "first_of_them", "index_0")
    contract_field(contract, "uniform", "philox4x32_10")
    probs = args["probs"]
    drawn = uniforms(args["seed"], args["offset"])
    if not probs.numel():
        return (Output("ids", drawn, None, torch.int64),)
    values = rows.positive(probs)
    kept = torch.where(rows.first(values, args["k"], args["p"]), values, 0.0)
    ids = index_of(kept, drawn)
    wrong = (~probs.isfinite()).int().argmax(-1)
    ids = torch.where(rows.sound(probs).squeeze(-1), ids, wrong)
    return (Output("ids", ids.double(), None, torch.int64),)


def index_of(kept: Tensor, drawn: Tensor) -> Tensor:
    """Where the running sum first exceeds a part of the whole; 0 where that is 0."""
    mass = kept.cumsum(-1)
    total = mass[:, -1]
    index = (mass <= (drawn * total).unsqueeze(-1)).sum(-1)
    return torch.where(total > 0, index, 0)


def _ready(trial: Trial) -> Tensor:
    """Rows from which something can be drawn."""
    probs = trial.args["probs"]
    return (rows.sound(probs) & (rows.positive(probs).amax(-1, keepdim=True) > 0)).squeeze(-1)


def _kept(trial: Trial) -> Tensor:
    args = trial.args
    return rows.first(rows.positive(args["probs"]), args["k"], args["p"])


def _supported(trial: Trial) -> Sequence[Pair] | None:
    """What is drawn is positive and kept by both filters."""
    ready, (ids,) = _ready(trial), trial.outputs
    if not bool(ready.any()):
        return None
    there = _kept(trial) & (trial.args["probs"] > 0)
    inside = (ids >= 0) & (ids < there.shape[-1])
    found = inside & there.gather(-1, ids.clamp(0, there.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return [Pair("drawn of what is kept", found[ready], torch.ones_like(found[ready]))]


def _largest(trial: Trial) -> Sequence[Pair] | None:
    """k = 1 and p = 0 leave one index to be drawn."""
    ready, probs = _ready(trial), trial.args["probs"]
    if probs.shape[-1] < 2 or not bool(ready.any()):
        return None
    first = rows.places(rows.positive(probs)).argmin(-1)
    changes: list[dict[str, Tensor]] = [
        {"k": rows.like(trial, "k", 1)}, {"p": rows.like(trial, "p", 0)},
    ]  # fmt: skip
    return [
        Pair(f"strictest {', '.join(change)}", trial.run(**change)[0][ready], first[ready])
        for change in changes
    ]


def _one_hot(trial: Trial) -> Sequence[Pair] | None:
    """A row of one positive element gives its index, whatever the numbers are."""
    ready, (ids,) = _ready(trial), trial.outputs
    columns = trial.args["probs"].shape[-1]
    if not bool(ready.any()):
        return None
    wanted = torch.where(ready, ids.clamp(0, columns - 1), columns - 1)
    hot = torch.zeros_like(trial.args["probs"]).scatter_(-1, wanted.unsqueeze(-1), 0.3)
    return [Pair("one-hot", trial.run(probs=hot)[0], wanted)]


def _dropped(trial: Trial) -> Sequence[Pair] | None:
    """What the filters drop is nothing to a draw."""
    kept, probs = _kept(trial) | ~_ready(trial).unsqueeze(-1), trial.args["probs"]
    if not bool((probs.masked_fill(kept, 0) != 0).any()):
        return None
    (got,) = trial.run(probs=torch.where(kept, probs, 0.0))
    return [Pair("what is dropped is 0", got, trial.outputs[0])]


def _scaled(trial: Trial) -> Sequence[Pair] | None:
    probs, p = trial.args["probs"], trial.args["p"].clamp(max=0.75)  # 1 disables: it isn't scaled
    if not (in_range(probs, -100, 20) and in_range(p, -100, 20)):
        return None
    (got,), (base,) = trial.run(probs=probs / 128, p=p / 128), trial.run(p=p)
    return [Pair("probs and p over 128", got, base)]


Drawn = Callable[[Tensor, Tensor, Tensor], Tensor]


def _of_kept(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    return index_of(torch.where(kept, values, 0.0), drawn)


def _plain(
    draw: Drawn = _of_kept,
    k: Callable[[Tensor], Tensor] = lambda k: k,
    p: Callable[[Tensor], Tensor] = lambda p: p,
    clean: Callable[[Tensor], Tensor] = rows.positive,
    stream: Callable[[Tensor, Tensor], Tensor] = uniforms,
    filters: Callable[[Tensor, Tensor, Tensor], Tensor] = rows.first,
    unsound: bool = False,
) -> Callable[..., Tensor]:
    """Returns a sampler made of these pieces."""

    def kernel(probs: Tensor, number: Tensor, mass: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        if not probs.numel():
            return torch.empty_like(seed, memory_format=torch.contiguous_format)
        values = clean(probs.contiguous())
        ids = draw(values, filters(values, k(number), p(mass)), stream(seed, offset))
        wrong = (~probs.isfinite()).int().argmax(-1)
        return ids if unsound else torch.where(rows.sound(probs).squeeze(-1), ids, wrong)

    return kernel


def _last_first(values: Tensor, k: Tensor, p: Tensor) -> Tensor:
    return rows.first(values.flip(-1), k, p).flip(-1)


def _one_after_the_other(values: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Top-p of what top-k keeps, renormalized."""
    kept = torch.where(rows.first(values, k, None), values, 0.0)
    total = kept.sum(-1, keepdim=True)
    return (kept > 0) & rows.first(kept / torch.where(total > 0, total, 1.0), None, p)


def _whole_row(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    """By the mass of the whole row; what goes beyond is the last that is kept."""
    mass = torch.where(kept, values, 0.0).cumsum(-1)
    index = (mass <= (drawn * values.sum(-1)).unsqueeze(-1)).sum(-1)
    last = values.shape[-1] - 1 - (mass == mass[:, -1:]).int().sum(-1) + 1
    return torch.minimum(index, last)


def _shifted_by_rest(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    rest = torch.where(kept, 0.0, values).sum(-1)
    return _of_kept(values, kept, (drawn + rest) % 1)


def _shifted_by_count(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    return _of_kept(values, kept, (drawn + 0.1 * (values > 0).sum(-1)) % 1)


def _moved(by: int) -> Drawn:
    def draw(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        return (_of_kept(values, kept, drawn) + by) % values.shape[-1]

    return draw


def _rank(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    place = rows.places(values)
    ordered = torch.empty_like(values).scatter_(-1, place, torch.where(kept, values, 0.0))
    return index_of(ordered, drawn)


def _from_the_end(values: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
    return values.shape[-1] - 1 - _of_kept(values.flip(-1), kept.flip(-1), drawn)


def _float32(seed: Tensor, offset: Tensor) -> Tensor:
    return uniforms(seed, offset).float().double()


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The plain sampler with another result."""
    kernel = _plain()
    return lambda *args: change(kernel(*args))


def _counting() -> Callable[..., Tensor]:
    count = itertools.count()
    return _changed(lambda ids: ids + next(count) % 3)


def _alternating() -> Callable[..., Tensor]:
    count = itertools.count()
    return _changed(lambda ids: ids + next(count) % 2)


def _few(limit: int) -> Callable[..., Tensor]:
    right = row_by_row(_plain(), range(5))
    return lambda *args: right(*args) + int(args[0].shape[0] <= limit)


def _by_row(seed: Tensor, offset: Tensor) -> Tensor:
    """As with one generator for a batch."""
    return uniforms(seed[:1].expand(seed.shape), offset + torch.arange(len(offset)))


_NOT_FOR_INDICES = (
    "alternating_result", "drifting_result", "random_rounding", "output_requires_grad",
    "flat_for_empty",
)  # fmt: skip
KERNEL = _plain()
MUTANTS = (
    Mutant("whole_row", ("support", "bound"), _plain(lambda v, _, u: index_of(v, u))),
    Mutant("k_ignored", ("support", "bound"), _plain(k=torch.zeros_like)),
    Mutant("p_ignored", ("support", "bound"), _plain(p=torch.ones_like)),
    Mutant("last_of_ties", ("support", "largest", "bound"), _plain(filters=_last_first)),
    Mutant("one_more_than_k", ("support", "largest", "bound"),
           _plain(k=lambda k: torch.where(k > 0, k + 1, k))),
    Mutant("p_0_disables", ("support", "largest", "bound"),
           _plain(p=lambda p: torch.where(p <= 0, 1.0, p))),
    Mutant("one_after_the_other", ("bound",), _plain(filters=_one_after_the_other)),
    Mutant("index_after", ("one_hot", "support", "bound"), _plain(_moved(1))),
    Mutant("index_before", ("one_hot", "support", "bound"), _plain(_moved(-1))),
    Mutant("place_for_index", ("one_hot", "support", "bound"), _plain(_rank)),
    Mutant("by_whole_mass", ("dropped", "bound"), _plain(_whole_row)),
    Mutant("shifted_by_rest", ("dropped", "bound"), _plain(_shifted_by_rest)),
    Mutant("shifted_by_count", ("dropped", "bound"), _plain(_shifted_by_count)),
    Mutant("from_the_end", ("bound",), _plain(_from_the_end)),
    Mutant("small_ones_dropped", ("scale", "bound"),
           _plain(clean=lambda x: rows.positive(x) * (x > 2**-9))),
    Mutant("on_a_grid", ("scale", "bound"),
           _plain(clean=lambda x: (rows.positive(x) * 1024).round() / 1024)),
    Mutant("constant_added", ("scale", "bound"), _plain(clean=lambda x: rows.positive(x) + 1e-3)),
    Mutant("seed_ignored", ("bound",), _plain(stream=lambda s, c: uniforms(s * 0, c))),
    Mutant("offset_ignored", ("bound",), _plain(stream=lambda s, c: uniforms(s, c * 0))),
    Mutant("32_bits_of_seed", ("bound",), _plain(stream=lambda s, c: uniforms(s % WORD, c))),
    Mutant("swapped", ("bound",), _plain(stream=lambda s, c: uniforms(c, s))),
    Mutant("nan_counts_as_0", ("bound",), _plain(unsound=True)),
    Mutant("counting", ("rerun",), _counting()),
    Mutant("alternating", ("rerun",), _alternating()),
    Mutant("generator_of_process", ("rerun",),
           _changed(lambda ids: ids + torch.randint(2**31, ids.shape))),
    Mutant("seed_of_row_0", ("row_permutation", "batch_invariance", "bound"),
           _plain(stream=_by_row)),
    Mutant("number_of_row_before", ("row_permutation", "bound"), faults.of_row_before(KERNEL)),
    Mutant("number_of_row_0", ("row_permutation", "bound"), faults.of_first_row(KERNEL)),
    Mutant("row_before", ("row_permutation", "bound"), faults.probs_of_row_before(KERNEL)),
    Mutant("fast_path_for_one_row", ("batch_invariance",), _few(1)),
    Mutant("fast_path_for_few_rows", ("batch_invariance",), _few(2)),
    Mutant("int32_for_empty", ("zero",),
           _changed(lambda ids: ids if ids.numel() else ids.int())),
    *(m for m in generic_mutants(KERNEL) if m.name not in _NOT_FOR_INDICES),
)  # fmt: skip
LAWS = (
    Law("support", "what is drawn is positive and kept by both filters", _supported),
    Law("largest", "k = 1 and p = 0 draw the first of the largest", _largest),
    Law("one_hot", "a row of one positive element gives its index", _one_hot),
    Law("dropped", "f(x) == f(x without what the filters drop)", _dropped),
    Law("scale", "f(x / 128, p / 128) == f(x, p)", _scaled),
    permuted_rows(FORM.arguments, "rows don't know each other"),
    alone(FORM.arguments),
)

proof = Proof(
    op=OP,
    arguments=FORM.arguments,
    shapes=FORM.shapes,
    draw=FORM.draw,
    axes=FORM.axes,
    row=FORM.row,
    zero=FORM.zero,
    classes=FORM.classes,
    named=FORM.named,
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
    fill=FORM.fill,
    cost=24,
)
