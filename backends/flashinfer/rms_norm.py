"""FlashInfer's rmsnorm."""

from torch import Tensor

from torch_ops import limits

from ._norms import normalize

__all__ = ["rms_norm", "supports"]


def supports(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return limits.norm(x, weight)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return normalize("rmsnorm", x, weight, eps)
