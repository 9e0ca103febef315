"""Pieces that proofs build their strategies from. The first choice of each is what shrinks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_ops.testing import values
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.layouts import LAYOUTS, fits
from torch_ops.testing.proof import Shapes
from torch_ops.testing.spec import Operand, Spec

FLOATS = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*FLOATS, "int32")

# Sizes at which kernels were found wrong: around powers of two, odd, and those of real models.
NICE = (
    1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257,
    500, 512, 513, 768, 769, 1023, 1024, 1025, 3584, 5120, 5125, 8192, 16384,
)  # fmt: skip
TOKENS = (7, 8, 16, 17, 33, 83, 128, 255, 256, 257)


def size(limit: int, nice: Sequence[int] = NICE, low: int = 1) -> SearchStrategy[int]:
    """A size up to `limit`: small first, else one of the known sizes."""
    limit = max(limit, low)
    known = [n for n in nice if low <= n <= limit]
    small = st.integers(low, max(low, min(64, limit)))
    return st.one_of(small, st.sampled_from(known)) if known else small


def tokens(limit: int) -> SearchStrategy[int]:
    """A number of rows up to `limit`."""
    limit = max(limit, 1)
    known = [n for n in TOKENS if n <= limit]
    small = st.integers(1, min(4, limit))
    return st.one_of(small, st.sampled_from(known)) if known else small


def seeds() -> SearchStrategy[int]:
    """Seeds of the content."""
    return st.integers(0, 2**16)


def specials(names: Sequence[str] = values.FINITE_SPECIALS) -> SearchStrategy[Any]:
    """Up to four special values at any places; most often none."""
    one = st.tuples(st.integers(0, 2**16), st.sampled_from(names))
    some = st.lists(one, min_size=1, max_size=4).map(tuple)
    return st.one_of(st.just(()), st.just(()), some)


@st.composite
def operand(
    draw: DrawFn,
    dtype: str,
    shape: tuple[int, ...],
    regimes: Sequence[str],
    *,
    names: Sequence[str] = (),
    mutated: bool = False,
    high: int = 0,
) -> Operand:
    """An operand of this shape: a layout that exists for it, a regime, some special values."""
    possible = [layout for layout in LAYOUTS if fits(layout, shape, mutated=mutated)]
    return Operand(
        dtype=dtype,
        layout=draw(st.one_of(st.just("contig"), st.sampled_from(possible))),
        regime=draw(st.sampled_from(regimes)),
        high=high,
        specials=draw(specials(names)) if names else (),
    )


def fitted(spec: Spec, shapes: Shapes, mutates: Sequence[str] = ()) -> Spec:
    """Replaces layouts that don't exist for the Spec's shapes by ``contig``, visibly."""

    def fit(name: str, o: Operand) -> Operand:
        if fits(o.layout, shapes[name], mutated=name in mutates):
            return o
        return Operand(o.dtype, "contig", o.regime, o.high, o.specials)

    return spec.replace(operands={name: fit(name, o) for name, o in spec.operands})


def pick(choice: Mapping[str, Any], name: str, options: Sequence[Any]) -> Any:
    """A value that depends on a row of the covering array without being an axis of it."""
    index = sum(ord(c) for key, value in choice.items() for c in f"{key}{value}{name}")
    return options[index % len(options)]
