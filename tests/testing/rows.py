"""What the tests of catalogue rows share: calling the reference, and proving one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of
from torch_ops.testing.arguments import contiguous
from torch_ops.testing.compare import check_outputs

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


def call(op: str, *args: Any) -> Any:
    """The reference, through the dispatcher."""
    return getattr(torch_ops.ops, op)(*args, backend="torch")


def proven(op: str, *args: Any) -> Any:
    """The reference's result, after it was found inside the bound of the oracle."""
    bound = catalogue()[op].signature.bind(*args)
    bound.apply_defaults()
    proof = proof_of(op)
    expected = proof.oracle(contiguous(dict(bound.arguments)), catalogue()[op].contract)
    result = call(op, *args)
    check_outputs((result,) if isinstance(result, Tensor) else result, expected)
    return result


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
