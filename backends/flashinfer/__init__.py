"""FlashInfer's kernels, compiled by nvcc at their first use: fp16, bf16, float8 on NVIDIA GPUs.

Limits and layouts are those of the sources of 0.6.13. Its compiled functions are called directly,
so that a later series, whose functions may differ, is refused.
"""

from __future__ import annotations

from torch_ops.installed import lacking
from torch_ops.platform import Requirement

__all__ = ["attention_backends", "available", "declined", "requires"]

_GIVEN_SCALE = "its norms quantize by one scale for all rows, and one that is given"
_UNROUNDED = "what is quantized isn't rounded before (the op's contract: quantized as rounded)"
_MX = "mxfp8_quantize has scales of powers of two, of groups of 32"

attention_backends = ("flashinfer_fa3", "flashinfer_fa2")
_GRADIENTS = "none of its kernels gives gradients"

requires = frozenset({Requirement.cuda(min_arch=(8, 0))})
declined = {
    "append_paged_kv_": (
        "append_paged_kv_cache takes rows of negative slots for such of a page far behind the last "
        "(the op's contract: skipped)"
    ),
    "apply_rope_append_paged_kv_": "rope_quantize_fp8_append_paged_kv_cache writes float8 alone",
    "attention_backward": _GRADIENTS,
    "fused_add_rms_norm_quant_fp8": _GIVEN_SCALE,
    "fused_add_rms_norm_quant_fp8_per_group": _GIVEN_SCALE,
    "fused_add_rms_norm_quant_fp8_per_tensor": _UNROUNDED,
    "fused_experts": (
        "cutlass_fused_moe reads the gate behind what it multiplies: all weights would be copied"
    ),
    "gelu_and_mul_backward": _GRADIENTS,
    "gelu_tanh_and_mul_backward": _GRADIENTS,
    "layer_norm_backward": _GRADIENTS,
    "min_p_filter": "min_p_sampling_from_probs draws at once, and gives no filtered rows",
    "moe_align_block_size": "none of its kernels sorts assignments into blocks",
    "quantize_fp8_per_group": _MX,
    "quantize_fp8_per_tensor": _MX,
    "quantize_fp8_per_token": _MX,
    "quantize_int8_per_token": "none of its kernels has codes of int8",
    "rms_norm_backward": _GRADIENTS,
    "rms_norm_quant_fp8": _GIVEN_SCALE,
    "rms_norm_quant_fp8_per_group": _GIVEN_SCALE,
    "rms_norm_quant_fp8_per_tensor": _UNROUNDED,
    "sample_top_k_top_p": (
        "rows are drawn by rejection, a new number of 24 bits for each trial (the op's contract: "
        "one number of 62 bits for a row, in the order of indices)"
    ),
    "scaled_mm_int8": "none of its products takes int8",
    "silu_and_mul_backward": _GRADIENTS,
    "silu_and_mul_quant_fp8": "its silu_and_mul quantizes to 4 bits alone",
    "silu_and_mul_quant_fp8_per_group": "its silu_and_mul quantizes to 4 bits alone",
    "silu_and_mul_quant_fp8_per_tensor": "its silu_and_mul quantizes to 4 bits alone",
    "top_k_renorm_probs": (
        "all that equal the k-th are kept (the op's contract: k of them, the lowest indices first)"
    ),
    "top_p_renorm_probs": (
        "all that equal the last are kept (the op's contract: the lowest indices first)"
    ),
    "topk_softmax": "it chooses experts inside of its layers of experts, or by sigmoids",
}


def available() -> str | None:
    """Whether the package is there; that its kernels compile shows at their first run."""
    return lacking("flashinfer", "flashinfer-python", "0.6.13", "0.7")
