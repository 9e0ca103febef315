"""Where batch invariance is declared, a predicate that reads the number of rows is a fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.search import covering_rows, dtypes_of
from torch_ops.testing.subject import subject_of

Supports = Callable[..., str | None]


def _examine(op: str, supports: Supports) -> Tally:
    """Runs the law on the reference behind a predicate: covering array and sizes of models."""

    def kernel(*args: Any) -> Any:
        return catalogue()[op].reference(*args)

    kernel.supports = supports  # type: ignore[attr-defined]
    tally = Tally()
    law = {"batch_invariance"}
    examiner = Examiner(subject_of(kernel), proof_of(op), catalogue()[op].contract, only=law)
    named = [spec for dtype in dtypes_of(op) for spec in proof_of(op).small_named(dtype)]
    for spec in [*covering_rows(op), *named]:
        examiner(spec, tally)
    return tally


@pytest.mark.parametrize("op", ["apply_rope", "apply_rope_"])
@pytest.mark.parametrize("backend", ["flashinfer", "sgl_kernel"])
def test_predicates_of_foreign_kernels_don_t_count(op: str, backend: str) -> None:
    supports = importlib.import_module(f"torch_ops.backends.{backend}.{op}").supports
    assert _examine(op, supports).laws["batch_invariance"] > 2


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        (lambda n: n > 6, r"takes \d of these rows, and refuses \d+: \d+ tokens"),
        (lambda n: n == 1, r"takes \d+ of these rows, and refuses 1: 1 tokens"),
    ],
)
def test_a_predicate_that_counts_is_found(refuses: Callable[[int], bool], message: str) -> None:
    def supports(q: Tensor, *_: object) -> str | None:
        return f"{q.shape[0]} tokens" if refuses(q.shape[0]) else None

    with pytest.raises(ViolationError, match=rf"\[batch_invariance\] supports\(\) {message}"):
        _examine("apply_rope", supports)


def test_a_predicate_may_read_everything_else_of_a_row() -> None:
    def supports(q: Tensor, k: Tensor, *_: object) -> str | None:
        return "an odd number of heads" if q.shape[1] % 2 else None

    assert _examine("apply_rope", supports).refused["an odd number of heads"]


def test_where_it_isn_t_declared_a_predicate_may_count() -> None:
    def supports(x: Tensor) -> str | None:
        return "several rows" if x.dim() > 1 and x.shape[0] > 1 else None

    tally = _examine("silu_and_mul", supports)
    assert tally.executed
    assert not tally.laws
    assert tally.refused["several rows"]
