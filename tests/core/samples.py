"""Small legal calls of every op, and ways to lay their tensors out in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue

HIDDEN = 16
Arguments = dict[str, Any]


def _x(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, 2, HIDDEN, dtype=dtype)


def _vector(dtype: torch.dtype) -> Tensor:
    return torch.randn(HIDDEN, dtype=dtype)


def _norm(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype), "weight": _vector(dtype), "eps": 1e-5}


def _layer_norm(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype), "weight": _vector(dtype), "bias": _vector(dtype), "eps": 1e-6}


def _fused(rows: int, dtype: torch.dtype) -> Arguments:
    x, residual = _x(rows, dtype), _x(rows, dtype)
    return {"x": x, "residual": residual, "weight": _vector(dtype), "eps": 1e-5}


def _gate(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype)}


def _rope(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(rows, 4, HIDDEN, dtype=dtype),
        "k": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "cos_sin_cache": torch.randn(32, 8),
        "positions": torch.arange(rows, dtype=torch.int32),
        "is_neox": True,
    }


def _attention(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(rows, 3, 4, HIDDEN, dtype=dtype),
        "k": torch.randn(rows, 5, 2, HIDDEN, dtype=dtype),
        "v": torch.randn(rows, 5, 2, HIDDEN, dtype=dtype),
        "is_causal": True,
        "scale": None,
        "window_left": -1,
        "logits_soft_cap": 0.0,
    }


def _merge(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "v_a": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "s_a": torch.randn(rows, 2),
        "v_b": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "s_b": torch.randn(rows, 2),
    }


MAKERS: dict[str, Callable[[int, torch.dtype], Arguments]] = {
    "apply_rope": _rope,
    "apply_rope_": _rope,
    "attention": _attention,
    "attention_with_lse": _attention,
    "fused_add_rms_norm": _fused,
    "fused_add_rms_norm_": _fused,
    "gelu_and_mul": _gate,
    "gelu_tanh_and_mul": _gate,
    "gemma_rms_norm": _norm,
    "layer_norm": _layer_norm,
    "merge_state": _merge,
    "rms_norm": _norm,
    "silu_and_mul": _gate,
}
OPS = sorted(MAKERS)
BACKENDS = ("torch", "inductor")
"""Those that a CPU has for every op."""


def arguments(op: str, rows: int = 3, dtype: torch.dtype = torch.float32) -> Arguments:
    """Make a legal call, by name and in order of the signature."""
    torch.manual_seed(len(op) + rows)
    made = MAKERS[op](rows, dtype)
    assert list(made) == list(catalogue()[op].signature.parameters)
    return made


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
    view = wide[..., 1::2]
    return view.copy_(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return _strided(tensor)
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
    view = wide[1:]
    return view.copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "strided": _strided,
    "transposed": _transposed,
    "offset": _offset,
}


def lay_out(values: Arguments, layout: str) -> Arguments:
    """Copy all tensors into another layout; the values stay."""
    change = LAYOUTS[layout]
    return {k: change(v) if isinstance(v, Tensor) else v for k, v in values.items()}


def outputs(op: str, values: Arguments, result: Any) -> list[Tensor]:
    """Give what a call made: its results, or the arguments that it wrote."""
    mutated = catalogue()[op].mutates
    if mutated:
        assert result is None
        return [values[name] for name in mutated]
    return [result] if isinstance(result, Tensor) else list(result)
