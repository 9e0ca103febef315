"""AITER's static_per_tensor_quant.

It takes a scale that is given: one that it computes is 0 for a tensor of zeros. Scales from 2**126
have reciprocals of 0, which in bfloat16 would show.
"""

import torch
from torch import Tensor

from torch_ops import limits
from torch_ops.declarations._quantization import fp8_of

from . import _library, _rows

__all__ = ["quantize_fp8_per_tensor", "supports"]


def supports(x: Tensor, scale: Tensor | None = None) -> str | None:
    if x.dtype != torch.float16:
        return limits.unsupported("x", x, (torch.float16,))
    if scale is None:
        return "scale None (required: that of zeros would be 0, the op's contract: 1e-10 / largest)"
    if x.numel() and x.shape[-1] % 16:
        return f"x of width {x.shape[-1]} (supported: multiples of 16)"
    return _rows.unfit(("x",), (x,))


def quantize_fp8_per_tensor(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    assert scale is not None
    out = scale.reshape(1).clone(memory_format=torch.contiguous_format)
    q = x.new_empty(x.shape, dtype=fp8_of(x))
    if x.numel():
        _library.run("static_per_tensor_quant", x, limits.rows(q), limits.rows(x), out)
    return q, out
