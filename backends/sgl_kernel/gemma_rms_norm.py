"""sgl-kernel's gemma_rmsnorm; it adds 1 to the weight in float32."""

from torch import Tensor

from torch_ops import limits

from ._norms import normalize

__all__ = ["gemma_rms_norm", "supports"]


def supports(x: Tensor, weight: Tensor, eps: float = 1e-6) -> str | None:
    return limits.norm(x, weight)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return normalize("gemma_rmsnorm", x, weight, eps)
