"""quantize_fp8_per_group: float8 codes with a scale for each group of neighbours in a row."""

from __future__ import annotations

from torch import Tensor

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import _quantization
from torch_ops.declarations._shared import upcast
from torch_ops.declare import op


@op(contract=QuantizationContract(per="group"), dtypes=_quantization.DTYPES)
def quantize_fp8_per_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantize groups of neighbours in the last axis to float8, each with a scale of its own.

    As `quantize_fp8_per_token` of ``x.unflatten(-1, (-1, group_size))``.

    Args:
        x: ``[..., hidden]`` float32, float16 or bfloat16, any strides.
        group_size: Elements of a group, a divisor of hidden.

    Returns:
        ``(q, scale)``: q ``[..., hidden]``, contiguous, float8_e4m3fn (largest 448), on gfx94x
        float8_e4m3fnuz (240); scale ``[..., hidden / group_size]`` float32, row-major. Rounded to
        nearest even. A group with NaN or an infinity is undefined.

    Raises:
        TypeError: the dtype isn't accepted.
        ValueError: x has no axis, or ``group_size`` doesn't divide its last one.
        NoBackwardError: the input requires grad.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.
    """
    return _quantization.quantize_groups(upcast(x), group_size, _quantization.fp8_of(x))


quantize_fp8_per_group.batch("x")


@quantize_fp8_per_group.check
def _check(x: Tensor, group_size: int = 128) -> None:
    _quantization.check("quantize_fp8_per_group", x)
    of = f"the last dimension of 'x' {list(x.shape)}"
    _quantization.check_group("quantize_fp8_per_group", group_size, x.shape[-1], of)


@quantize_fp8_per_group.fake
def _fake(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    return _quantization.empty(x, _quantization.fp8_of(x), x.shape[-1] // group_size)
