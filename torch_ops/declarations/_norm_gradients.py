"""What the gradients of norms share: checks, the fakes of vectors, and sums over rows."""

from __future__ import annotations

from torch import Tensor

from torch_ops import checks

__all__ = ["check", "empty", "summed"]


def check(
    op: str,
    x: Tensor,
    grad: Tensor,
    vectors: dict[str, Tensor | None],
    eps: float,
    residual_grad: Tensor | None = None,
) -> None:
    """Refuse all but what the norm takes, and gradients like its results."""
    checks.float_dtype(op, "x", x)
    if x.dim() < 1:
        checks.refuse(op, "x", "of shape []", "rank >= 1, [..., hidden]")
    for name, gradient in (("grad", grad), ("residual_grad", residual_grad)):
        if gradient is not None:
            checks.shape(op, name, gradient, x.shape, "the shape of 'x'")
            checks.like(op, name, gradient, x, "x")
    for name, vector in vectors.items():
        if vector is not None:
            checks.vector(op, name, vector, x)
    checks.non_negative(op, "eps", eps)


def empty(vector: Tensor | None, x: Tensor) -> Tensor:
    """Give an empty gradient of a vector; of no elements where there is none."""
    return x.new_empty(0) if vector is None else vector.new_empty(vector.shape)


def summed(terms: Tensor, vector: Tensor | None, x: Tensor) -> Tensor:
    """Add ``[..., hidden]`` over all rows: the gradient of a vector, in its dtype."""
    if vector is None:
        return empty(vector, x)
    return terms.unsqueeze(0).sum(list(range(terms.dim()))).to(vector.dtype)
