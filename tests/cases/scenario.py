"""Scenarios of catalogue rows: each a function of the kernels under test, an op and a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .kernels import Kernels

Check = Callable[[Kernels, str, torch.dtype], None]


@dataclass(frozen=True)
class Scenario:
    """What goes wrong in rows, tried on one op and dtype.

    Attributes:
        rows: Ids in the catalogue.
        check: Raises what it finds.
        op, dtype: What it is tried on.
        gigabytes: GPU memory that it takes; more than none for tensors of 2^31 elements.
    """

    rows: tuple[str, ...]
    check: Check
    op: str
    dtype: torch.dtype
    gigabytes: int = 0

    def __call__(self, kernels: Kernels) -> None:
        """Try it."""
        self.check(kernels, self.op, self.dtype)

    def __str__(self) -> str:
        return f"{'-'.join(self.rows)}-{self.op}-{str(self.dtype).removeprefix('torch.')}"


SCENARIOS: list[Scenario] = []


def scenario(
    *rows: str, ops: Sequence[str], dtypes: Sequence[torch.dtype], gigabytes: int = 0
) -> Callable[[Check], Check]:
    """Add a scenario of these rows for each op and dtype."""

    def add(check: Check) -> Check:
        SCENARIOS.extend(Scenario(rows, check, op, d, gigabytes) for op in ops for d in dtypes)
        return check

    return add
