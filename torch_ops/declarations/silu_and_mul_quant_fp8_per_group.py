"""silu_and_mul_quant_fp8_per_group: silu_and_mul, then quantize_fp8_per_group."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _gates, _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declarations.silu_and_mul import silu_and_mul
from torch_ops.declare import op
from torch_ops.inlined import rounded

_OP = "silu_and_mul_quant_fp8_per_group"
_activate = silu_and_mul.reference


@op(contract=QuantizationContract(per="group", quantized="rounded"), dtypes=_quantization.DTYPES)
def silu_and_mul_quant_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Multiply the activated gate by the value and quantize that to float8 in groups.

    As `quantize_fp8_per_group` of `silu_and_mul`, which is rounded to the dtype of x in between: a
    backend's two ops and this one give the same bits.

    Args:
        x: ``[..., 2d]`` float32, float16 or bfloat16, any strides; the gate first.
        group_size: Elements of a group, a divisor of d.

    Returns:
        ``(q, scale)``, those of `quantize_fp8_per_group`: ``[..., d]`` float8 and
        ``[..., d / group_size]`` float32. A group with NaN or an infinity is undefined.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: the last dimension is odd, or ``group_size`` doesn't divide d.
        NoBackwardError: an input requires grad.
    """
    gated = _activate(x)
    wide, dtype = upcast(rounded(gated)), _quantization.fp8_of(x)
    return _quantization.quantize_groups(wide, group_size, dtype)


silu_and_mul_quant_fp8_per_group.batch("x")


@silu_and_mul_quant_fp8_per_group.check
def _check(x: Tensor, group_size: int = 128) -> None:
    _quantization.check(_OP, x)
    _gates.check(_OP, x)
    of = f"half the last dimension of 'x' {list(x.shape)}"
    _quantization.check_group(_OP, group_size, x.shape[-1] // 2, of)


@silu_and_mul_quant_fp8_per_group.fake
def _fake(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=_quantization.fp8_of(x))
    return codes, x.new_empty((*x.shape[:-1], x.shape[-1] // 2 // group_size), dtype=torch.float32)
