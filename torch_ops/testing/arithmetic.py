"""The constants that error bounds are made of, per dtype. No tolerance lives here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounding:
    """How an op with inputs of one dtype rounds.

    A result is rounded once to the dtype with relative error `u` and absolute error `eta` (half
    the smallest subnormal). What comes before is computed with unit `acc`: that of float32, or of
    float64 for float64 inputs. For float64 the oracle rounds as much as the kernel, so both units
    are doubled there: the difference of two such results is bounded by the sum of their errors.
    """

    u: float
    eta: float
    acc: float
    tiny: float


def rounding(dtype: torch.dtype) -> Rounding:
    """Returns the rounding of an op whose inputs and outputs have this dtype."""
    info = torch.finfo(dtype)
    u = info.eps / 2
    eta = info.tiny * u
    if dtype == torch.float64:
        return Rounding(2 * u, 2 * eta, 2 * u, info.tiny)
    fp32 = torch.finfo(torch.float32)
    return Rounding(u, eta, fp32.eps / 2, fp32.tiny)


def overflow_threshold(dtype: torch.dtype) -> float:
    """The smallest magnitude that rounds to infinity: half an ulp above the largest finite value.

    For float64 it isn't representable; the oracle overflows by itself there.
    """
    if dtype == torch.float64:
        return math.inf
    info = torch.finfo(dtype)
    return info.max + info.eps / 4 * 2.0 ** math.ceil(math.log2(info.max))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an op with inputs of this dtype computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def f64(value: Tensor | None) -> Tensor | None:
    """The exact float64 value of a tensor, or None."""
    return None if value is None else value.double()


def bits_equal(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: the same value, where any NaN equals any NaN and -0 equals 0.

    The sign of a zero sum and the payload of a NaN depend on evaluation order, which no law of an
    op fixes; every other difference counts.
    """
    if not a.dtype.is_floating_point:
        return a == b
    return (a == b) | (a.isnan() & b.isnan())


def ulps(actual: float, oracle: float, dtype: torch.dtype) -> float:
    """The distance in units in the last place of the oracle's binade; of integers, in ones."""
    if not dtype.is_floating_point:
        return abs(actual - oracle)
    if not (math.isfinite(actual) and math.isfinite(oracle)):
        return math.nan
    info = torch.finfo(dtype)
    magnitude = max(abs(oracle), info.tiny)
    return abs(actual - oracle) / (info.eps * 2.0 ** math.floor(math.log2(magnitude)))


def contract_field(contract: Any, name: str, *accepted: str) -> str:
    """Reads a field that a bound or an oracle depends on.

    Raises:
        LookupError: The declaration's contract lacks the field, or no bound is derived for its
            value.
    """
    received = getattr(contract, name, None)
    if received not in accepted:
        msg = (
            f"contract {type(contract).__name__}.{name}: received {received!r}, accepted "
            f"{accepted}: there is no bound for anything else"
        )
        raise LookupError(msg)
    return str(received)
