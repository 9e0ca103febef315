"""Forms of laws that many ops share; proofs fill in which arguments they speak about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.compare import ViolationError
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Trial


def flip_rows(value: Tensor) -> Tensor:
    """Reverses the first axis: a permutation of rows that moves every one of them."""
    return flipped(value, 0)


def flipped(value: Tensor, axis: int) -> Tensor:
    """Reverses an axis; float8 has no such function, bytes do."""
    bits = value.view(torch.uint8) if value.element_size() == 1 else value
    return bits.flip(axis).contiguous().view(value.dtype)


def twice(bound: Tensor | None) -> Tensor | None:
    """By how much two results within a bound may differ; None for exact ones."""
    return None if bound is None else 2 * bound


def _have_rows(trial: Trial, names: Sequence[str]) -> bool:
    """Whether the first axis is one of rows: an argument of one axis alone is a row itself."""
    return all(trial.args[n].dim() for n in names) and any(trial.args[n].dim() > 1 for n in names)


def permuted_rows(
    names: Sequence[str],
    statement: str,
    oracle: Callable[[Arguments, Any], Sequence[Output]] | None = None,
) -> Law:
    """f(P args) == P f(args) for a permutation P of the first axis of these arguments.

    With an oracle this holds bit for bit only where batch invariance is declared, else within
    twice the bound: vectorized code may evaluate the last elements of its loop otherwise.
    """

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        if not _have_rows(trial, names) or trial.args[names[0]].shape[0] == 1:
            return None
        flipped = {n: flip_rows(trial.args[n]) for n in names}
        bounds: list[Tensor | None] = [None] * len(trial.outputs)
        if oracle is not None and not trial.contract.batch_invariant:
            expected = oracle({**trial.args, **flipped}, trial.contract)
            bounds = [twice(e.bound) for e in expected]
        return [
            Pair(f"output {i}, rows reversed", got, flip_rows(base), bound)
            for i, (got, base, bound) in enumerate(
                zip(trial.run(**flipped), trial.outputs, bounds, strict=True)
            )
        ]

    return Law("row_permutation", statement, pairs)


def _uncounted(trial: Trial, names: Sequence[str]) -> None:
    """Checks that the kernel's predicate takes the same rows in other numbers.

    Else another kernel, with other bits, would serve a row where the batch is of another size.
    """
    rows = trial.args[names[0]].shape[0]
    if not rows or trial.refuses(trial.args) is not None:
        return
    for count in (1, rows + 1, 2 * rows):
        # Copies: addresses are as aligned as those of any tensor.
        taken = torch.arange(count, device=trial.args[names[0]].device) % rows
        reason = trial.refuses({**trial.args, **{n: trial.args[n][taken] for n in names}})
        if reason is not None:
            detail = f"supports() takes {rows} of these rows, and refuses {count}: {reason}"
            raise ViolationError("batch_invariance", detail)


def alone(names: Sequence[str]) -> Law:
    """A row of a batch gives the same bits without the others, by the same kernel."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        if not _have_rows(trial, names):
            return None
        _uncounted(trial, names)
        if trial.args[names[0]].shape[0] < 2:
            return None
        found = []
        for place in (slice(0, 1), slice(-1, None)):
            got = trial.run(**{n: trial.args[n][place].contiguous() for n in names})
            found += [
                Pair(f"output {i}, row {place.start} alone", a, b[place])
                for i, (a, b) in enumerate(zip(got, trial.outputs, strict=True))
            ]
        return found

    statement = "f(args)[i] == f(args[i])"
    return Law("batch_invariance", statement, pairs, declared="batch_invariant")


def negated(name: str, inputs: Sequence[str], signs: Sequence[int], statement: str) -> Law:
    """Negating these inputs multiplies output i by ``signs[i]``."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        present = [n for n in inputs if trial.args[n] is not None]
        if not present:
            return None
        got = trial.run(**{n: -trial.args[n] for n in present})
        return [
            Pair(f"output {i}, {', '.join(present)} negated", a, b if sign > 0 else -b)
            for i, (a, b, sign) in enumerate(zip(got, trial.outputs, signs, strict=True))
        ]

    return Law(name, statement, pairs)


def in_range(value: Tensor, low: int, high: int) -> bool:
    """Whether all nonzero elements are finite and of magnitude 2^low to 2^high."""
    size = value[value != 0].double().abs()
    if not size.numel():
        return True
    return bool(size.isfinite().all() and size.min() >= 2.0**low and size.max() <= 2.0**high)


def safe_exponents(dtype: torch.dtype) -> tuple[int, int]:
    """Exponents between which scaling by 2^6 stays exact, squares in float32 included."""
    return (-8, 9) if dtype == torch.float16 else (-50, 50)


def scaled(value: Tensor, power: int) -> Tensor:
    """The tensor times 2^power."""
    return value * 2.0**power


def scaled_pair(what: str, got: Tensor, base: Tensor, power: int) -> Pair:
    """Compares got with 2^power base where neither over- nor underflow can have rounded."""
    info = torch.finfo(base.dtype)
    size = base.double().abs()
    floor, ceiling = info.tiny * 2.0 ** (abs(power) + 12), info.max / 2.0 ** (abs(power) + 1)
    keep = (size >= floor) & (size <= ceiling)
    keep |= (size == 0) & (got.double().abs() >= floor)
    nothing = torch.zeros_like(base)
    return Pair(
        what, torch.where(keep, got, nothing), torch.where(keep, scaled(base, power), nothing)
    )


def homogeneous(
    name: str,
    inputs: Mapping[str, int],
    powers: Sequence[int],
    statement: str,
    applies: Callable[[Trial], bool] | None = None,
) -> Law:
    """Scaling input n by ``2^inputs[n]`` scales output i by ``2^powers[i]``, bit for bit."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        present = [n for n in inputs if trial.args[n] is not None]
        ready = all(in_range(trial.args[n], *safe_exponents(trial.args[n].dtype)) for n in present)
        if not present or not ready or (applies is not None and not applies(trial)):
            return None
        got = trial.run(**{n: scaled(trial.args[n], inputs[n]) for n in present})
        return [
            scaled_pair(f"output {i}, {', '.join(present)} scaled", a, b, power)
            for i, (a, b, power) in enumerate(zip(got, trial.outputs, powers, strict=True))
        ]

    return Law(name, statement, pairs)


_SAMPLE, _FARTHEST = 1024, 6.0
_RANDOM = ("normal", "near_one", "unit_circle")


def _standard_errors(error: Tensor) -> Tensor:
    """How many of its standard errors a mean is from zero: ``[1]``."""
    spread = error.std() / error.numel() ** 0.5
    z: Tensor = error.mean().abs() / spread
    return z.nan_to_num(0.0).reshape(1)


def _biases(trial: Trial) -> Sequence[Pair] | None:
    floats = [o for _, o in trial.spec.operands if not o.dtype.startswith("int")]
    if not all(o.regime in _RANDOM for o in floats):
        return None
    found = []
    for got, want in zip(trial.outputs, trial.expected, strict=True):
        if want.bound is None or want.dtype not in (torch.float16, torch.bfloat16):
            continue
        size, u = want.value.abs(), torch.finfo(want.dtype).eps / 2
        rounds = (size >= torch.finfo(want.dtype).tiny) & (want.bound <= 1.05 * u * size)
        exact, actual = want.value[rounds], got.cpu()[rounds].double()
        first = _first_of_each(exact)[:_SAMPLE]
        if first.numel() < _SAMPLE:
            continue
        exact = exact[first]
        error = (actual[first] - exact) / exact.abs()
        limit = torch.full((1,), _FARTHEST, dtype=torch.float64)
        for what, signed in (("away from zero", error * exact.sign()), ("upwards", error)):
            z = _standard_errors(signed)
            label = f"{want.name}: standard errors of the mean error {what}"
            found.append(Pair(label, z, torch.zeros_like(z), limit))
    return found or None


def _first_of_each(values: Tensor) -> Tensor:
    """Where each distinct value stands for the first time, in order."""
    distinct, places = torch.unique(values, return_inverse=True)
    first = torch.full((distinct.numel(),), values.numel(), dtype=torch.int64)
    return first.scatter_reduce(0, places, torch.arange(values.numel()), "amin").sort().values


def rounding_bias() -> Law:
    """Rounding to nearest has no bias.

    Truncation stays within one ulp and passes every bound of a call; over layers it shrinks what
    it is done to. Where inputs are random and the one rounding to a narrow dtype dominates the
    bound, signed relative errors of 1024 distinct exact values average to zero within six standard
    errors: by chance more happens in one of 5e8 examples. More values than that show how products
    of few distinct factors are spread.
    """
    statement = "signed errors of rounding average out"
    return Law("rounding_bias", statement, _biases, dtypes=("float16", "bfloat16"))


def contiguous_copy(trial: Trial) -> Sequence[Pair] | None:
    """The generic law of layouts: a strided argument gives what its contiguous copy gives.

    As for permuted rows bit for bit only where batch invariance is declared: PyTorch's sums of a
    row are vectorized by how it lies, and Inductor compiles for offsets apart.
    """
    if trial.spec.contiguous:
        return None
    bounds: list[Tensor | None] = [None] * len(trial.outputs)
    if not trial.contract.batch_invariant:
        bounds = [twice(e.bound) for e in trial.expected]
    return [
        Pair(f"output {i}, contiguous arguments", got, base, bound)
        for i, (got, base, bound) in enumerate(zip(trial.run(), trial.given, bounds, strict=True))
    ]


def rerun(trial: Trial) -> Sequence[Pair] | None:
    """The generic law of determinism, for ops that declare it; the second run is as servers'."""
    first = trial.run()
    with torch.inference_mode():
        second = trial.run()
    return [
        Pair(f"output {i}, run again in inference mode", b, a)
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]


GENERIC = (
    Law("layout", "strided, offset and overlapping inputs give what contiguous ones give",
        contiguous_copy),
    Law("rerun", "the same call gives the same bits, also in inference mode", rerun,
        declared="deterministic"),
)  # fmt: skip
