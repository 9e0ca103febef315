"""fused_experts in Triton."""

from torch import Tensor

from ._experts import refusal, run

__all__ = ["fused_experts", "supports"]


def fused_experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    return run(x, w_gate_up, w_down, weights, ids)


def supports(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor
) -> str | None:
    return refusal(x)
