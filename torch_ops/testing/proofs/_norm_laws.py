"""Laws that several norms obey."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_ops.testing.laws import in_range, safe_exponents, scaled, scaled_pair
from torch_ops.testing.proof import Law, Pair, Trial
from torch_ops.testing.proofs._norms import EPS

POWER = 2


def eps_shift(eps: float) -> int:
    """The power of two to scale x by so that eps times its square is one of `EPS` again."""
    return POWER if eps * 4**POWER <= max(EPS) * 1.5 else -POWER


def scale_with_eps(inputs: Sequence[str], powers: Sequence[int], *, fixed: str = "") -> Law:
    """Scaling x by 2^k and eps by 4^k changes nothing but exponents."""

    def pairs(trial: Trial) -> Sequence[Pair] | None:
        tensors = {n: trial.args[n] for n in inputs}
        if fixed and trial.args[fixed] is not None:
            return None
        if not all(in_range(t, *safe_exponents(t.dtype)) for t in tensors.values()):
            return None
        k = eps_shift(trial.args["eps"])
        changed = {n: scaled(t, k) for n, t in tensors.items()}
        got = trial.run(**changed, eps=trial.args["eps"] * 4.0**k)
        return [
            scaled_pair(
                f"output {i}, {', '.join(inputs)} times 2^{k}, eps times 4^{k}", a, b, k * p
            )
            for i, (a, b, p) in enumerate(zip(got, trial.outputs, powers, strict=True))
        ]

    return Law("scale_with_eps", "f(2^k x, 4^k eps) == f(x, eps)", pairs)


def zero_rows(rows: Sequence[str]) -> Law:
    """A row of zeros gives zeros, never NaN."""

    def pairs(trial: Trial) -> Sequence[Pair]:
        nothing = {n: torch.zeros_like(trial.args[n]) for n in rows}
        return [
            Pair(f"output {i} of zero rows", got, torch.zeros_like(got))
            for i, got in enumerate(trial.run(**nothing))
        ]

    return Law("zero_rows", "f(0) == 0", pairs)
