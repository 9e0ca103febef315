"""Small calls of every op."""

from __future__ import annotations

from typing import Any

from torch_ops.testing.proof import proof_of
from torch_ops.testing.spec import Operand, Spec


def small(op: str, tokens: int = 4) -> Spec:
    """A call in bfloat16 of so many rows; of attention, so many queries, or sequences."""
    if op.startswith("attention"):
        return attention(op, queries=tokens)
    spec = proof_of(op).zero("bfloat16")[0]
    return spec.replace(dims={name: size or tokens for name, size in spec.dims})


def attention(op: str = "attention", queries: int = 4, **flags: Any) -> Spec:
    """Two sequences, two key heads of three query heads each, 32 keys."""
    dims = {
        "batch": 2, "queries": queries, "keys": 32, "kv_heads": 2, "group": 3, "head_dim": 8,
    }  # fmt: skip
    params = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    return Spec.of(op, dims, {name: Operand("bfloat16") for name in "qkv"}, params | flags)
