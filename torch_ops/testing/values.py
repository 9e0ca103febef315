"""Value regimes and special values: what the tensors of an example hold.

Every regime makes float64 values from a shape and a generator; `cast` rounds them to the
operand's dtype and keeps them finite. Index regimes make integers below `high`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Shape = tuple[int, ...]
Regime = Callable[[Shape, torch.Generator], Tensor]
IndexRegime = Callable[[Shape, torch.Generator, int], Tensor]


def _normal(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _uniform(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def _counting(shape: Shape) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def _rows(shape: Shape, g: torch.Generator) -> Tensor:
    """Normal values, each row times its own power of two between 2^-12 and 2^12."""
    if not shape:
        return _normal(shape, g)
    power = torch.randint(-12, 13, (*shape[:-1], 1), generator=g)
    return torch.ldexp(_normal(shape, g), power)


def _one_hot(shape: Shape, g: torch.Generator) -> Tensor:
    out = torch.zeros(shape, dtype=torch.float64)
    if out.numel():
        rows = out.view(-1, shape[-1]) if shape else out.view(1, 1)
        place = torch.randint(rows.shape[1], (rows.shape[0], 1), generator=g)
        rows.scatter_(1, place, 3.0)
    return out


def _equal_rows(shape: Shape, g: torch.Generator) -> Tensor:
    return _normal((*shape[:-1], 1) if shape else shape, g).expand(shape).clone()


def _alternating(shape: Shape, g: torch.Generator) -> Tensor:
    return (1 + _uniform(shape, g)) * (1 - 2 * _counting(shape).remainder(2))


def _sparse(shape: Shape, g: torch.Generator) -> Tensor:
    """Integers up to 2 in size, three quarters of them zero: every partial sum is exact."""
    ints = torch.randint(-2, 3, shape, generator=g).double()
    return torch.where(_uniform(shape, g) < 0.75, torch.zeros_like(ints), ints)


def _spiky(shape: Shape, g: torch.Generator) -> Tensor:
    return _normal(shape, g) * 1e-2 + 300 * _one_hot(shape, g)


def _unit_circle(shape: Shape, g: torch.Generator) -> Tensor:
    """Rows of cosines then sines of random angles; row 0 is the angle 0, row 1 a quarter turn."""
    *lead, width = shape
    angle = _uniform((*lead, width // 2), g) * (2 * math.pi)
    out = torch.cat([angle.cos(), angle.sin()], dim=-1)
    if lead and lead[0] > 0:
        out[0, ..., : width // 2], out[0, ..., width // 2 :] = 1.0, 0.0
    if lead and lead[0] > 1:
        out[1, ..., : width // 2], out[1, ..., width // 2 :] = 0.0, 1.0
    return out


REGIMES: dict[str, Regime] = {
    "normal": _normal,
    "zeros": lambda shape, g: torch.zeros(shape, dtype=torch.float64),
    "ones": lambda shape, g: torch.ones(shape, dtype=torch.float64),
    "arange17": lambda shape, g: _counting(shape).remainder(17),
    "grid": lambda shape, g: torch.randint(-16, 17, shape, generator=g).double() / 4,
    "sparse": _sparse,
    "rows": _rows,
    "constant": lambda shape, g: torch.full(shape, 0.3, dtype=torch.float64),
    "one_hot": _one_hot,
    "equal_rows": _equal_rows,
    "alternating": _alternating,
    "mean_shift": lambda shape, g: 100 + _normal(shape, g) / 100,
    "spiky": _spiky,
    "sorted": lambda shape, g: (
        _normal(shape, g).sort(dim=-1).values if shape else _normal(shape, g)
    ),
    "ties": lambda shape, g: torch.randint(-1, 2, shape, generator=g).double(),
    "tiny": lambda shape, g: _normal(shape, g) * 1e-30,
    "small": lambda shape, g: _normal(shape, g) * 1e-3,
    "wide": lambda shape, g: _normal(shape, g) * 12,
    "huge": lambda shape, g: (_uniform(shape, g) + 1) * 3e4,
    "enormous": lambda shape, g: _normal(shape, g) * 1e15,
    "near_one": lambda shape, g: 1 + _normal(shape, g) / 10,
    "unit_circle": _unit_circle,
    "bytes": lambda shape, g: torch.randint(-128, 128, shape, generator=g).double(),
}

INDEX_REGIMES: dict[str, IndexRegime] = {
    "index": lambda shape, g, high: torch.randint(max(high, 1), shape, generator=g),
    "first": lambda shape, g, high: torch.zeros(shape, dtype=torch.int64),
    "last": lambda shape, g, high: torch.full(shape, high - 1),
    "counting": lambda shape, g, high: _counting(shape).remainder(max(high, 1)).long(),
    "backwards": lambda shape, g, high: (
        high - 1 - _counting(shape).remainder(max(high, 1))
    ).long(),
}

SPECIALS: dict[str, float] = {
    "0": 0.0,
    "-0": -0.0,
    "1": 1.0,
    "-1": -1.0,
    "255": 255.0,
    "256": 256.0,
    "448": 448.0,
    "449": 449.0,
    "464": 464.0,
    "465": 465.0,
    "65504": 65504.0,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}
FINITE_SPECIALS = tuple(name for name, value in SPECIALS.items() if math.isfinite(value))


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float64 values to a dtype; what is finite stays finite."""
    if not dtype.is_floating_point:
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def write_specials(values: Tensor, specials: tuple[tuple[int, str], ...]) -> None:
    """Overwrites single elements of a contiguous tensor with named special values.

    ``"max"``, ``"min"`` and ``"tiny"`` are the limits of the tensor's own dtype.
    """
    if not (specials and values.numel()):
        return
    info = torch.finfo(values.dtype)
    own = {"max": info.max, "min": info.min, "tiny": info.tiny}
    flat = values.view(-1)
    for position, name in specials:
        flat[position % flat.numel()] = own[name] if name in own else SPECIALS[name]
