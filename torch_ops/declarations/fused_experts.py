"""fused_experts: run each token through its experts, and add their results by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops import checks, dynamo
from torch_ops.contracts import ExpertsContract
from torch_ops.declarations._shared import accumulation_dtype
from torch_ops.declare import op

_OP = "fused_experts"


@op(contract=ExpertsContract())
def fused_experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """Give the weighted sum of each token's experts, gated feed-forward layers.

    gate, up = split(w_gate_up[e] x); out = sum of weights * w_down[e] (silu(gate) * up), e in ids

    Args:
        x: ``[T, H]`` float16, bfloat16, float32 or float64, any strides.
        w_gate_up: ``[E, 2F, H]``, gate first, dtype and device of ``x``, any strides.
        w_down: ``[E, H, F]``, dtype and device of ``x``, any strides.
        weights: ``[T, k]`` float32.
        ids: ``[T, k]`` int32 experts of each token. One that is negative, or no expert's, adds
            nothing, and neither its weight nor any expert is read for it.

    Returns:
        ``[T, H]`` of dtype of ``x``, contiguous. Products, gate and sums are computed in float32
        (float64 for float64 values); silu(gate) * up is rounded to the dtype of ``x``. Weights of
        experts that no token chose are never read.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: shapes or devices disagree.
        NoBackwardError: an input requires grad.

    Source: Shazeer et al., Outrageously large neural networks (arXiv 1701.06538).
    """
    wide = accumulation_dtype(x.dtype)
    tokens, width = x.contiguous().to(wide), w_down.shape[2]
    out = tokens.new_zeros(tokens.shape)
    for expert in range(w_down.shape[0]):
        chosen = ids == expert
        rows = _rows_of(chosen)
        if isinstance(rows, Tensor) and not rows.shape[0]:
            continue
        share = weights.to(wide).masked_fill(~chosen, 0.0).sum(-1, keepdim=True)[rows]
        gate_up = tokens[rows] @ w_gate_up[expert].contiguous().to(wide).t()
        gate, up = gate_up[:, :width], gate_up[:, width:]
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).to(wide)
        part = share * (hidden @ w_down[expert].contiguous().to(wide).t())
        out[rows] += part.masked_fill(~chosen.any(-1, keepdim=True)[rows], 0.0)
    return out.to(x.dtype)


def _rows_of(chosen: Tensor) -> Any:
    """Give an expert's tokens, all of them where reading that waits, or a tracer sees it."""
    traced = torch.compiler.is_dynamo_compiling() or chosen.device.type != "cpu"
    if traced or dynamo.watched(chosen):
        return slice(None)
    return chosen.any(-1).nonzero().flatten()


@fused_experts.check
def _check(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> None:
    checks.float_dtype(_OP, "x", x)
    checks.rank(_OP, "x", x, 2, "[T, H]")
    if w_down.dim() != 3 or w_down.shape[1] != x.shape[1]:
        wanted = f"[E, {x.shape[1]}, F], H of 'x'"
        checks.refuse(_OP, "w_down", f"of shape {list(w_down.shape)}", wanted)
    experts, hidden, width = w_down.shape
    wide = (experts, 2 * width, hidden)
    checks.shape(_OP, "w_gate_up", w_gate_up, wide, "[E, 2F, H] of 'w_down'")
    checks.like(_OP, "w_gate_up", w_gate_up, x, "x")
    checks.like(_OP, "w_down", w_down, x, "x")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        checks.refuse(_OP, "ids", f"of shape {list(ids.shape)}", f"[{x.shape[0]}, k], T of 'x'")
    checks.shape(_OP, "weights", weights, ids.shape, "[T, k] of 'ids'")
    for name, tensor, dtype in (("weights", weights, torch.float32), ("ids", ids, torch.int32)):
        if tensor.dtype != dtype:
            checks.refuse(_OP, name, tensor.dtype, str(dtype), kind=TypeError)
        if tensor.device != x.device:
            checks.refuse(_OP, name, f"on device {tensor.device}", f"{x.device}, as 'x'")


@fused_experts.fake
def _fake(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return x.new_empty(x.shape)
