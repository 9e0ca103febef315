"""sgl-kernel's kernels: built ahead, for NVIDIA GPUs.

Limits and layouts are those of sglang-kernel 0.4.6. Its operators are called directly: its Python
functions hand the norms to FlashInfer where that is installed.
"""

from __future__ import annotations

from torch_ops.installed import lacking
from torch_ops.platform import Requirement

__all__ = ["available", "declined", "requires"]

_ATTENTION = "its FlashAttention 3 isn't wrapped: FlashInfer's serves the same GPUs"
_PAGED = f"{_ATTENTION}, and takes lists of pages that are packed"

_GRADIENTS = "none of its kernels gives gradients"

requires = frozenset({Requirement.cuda(min_arch=(8, 0))})
declined = {
    "append_paged_kv_": (
        "transfer_kv_per_layer writes rows of negative slots in front of the cache "
        "(the op's contract: skipped)"
    ),
    "apply_rope_append_paged_kv_": "its rotary_embedding writes into no cache",
    "attention": _ATTENTION,
    "attention_backward": _GRADIENTS,
    "attention_with_lse": _ATTENTION,
    "fused_add_rms_norm_quant_fp8": "none of its norms quantizes",
    "fused_add_rms_norm_quant_fp8_per_group": "none of its norms quantizes",
    "fused_add_rms_norm_quant_fp8_per_tensor": "none of its norms quantizes",
    "fused_experts": "none of its products of experts takes float16 or bfloat16",
    "gelu_and_mul_backward": _GRADIENTS,
    "gelu_tanh_and_mul_backward": _GRADIENTS,
    "layer_norm": "none of its norms subtracts the mean",
    "layer_norm_backward": _GRADIENTS,
    "min_p_filter": "none of its kernels filters by min-p",
    "moe_align_block_size": (
        "an expert's assignments lie as threads get to them (the op's contract: ascending)"
    ),
    "paged_decode": _PAGED,
    "paged_prefill": _PAGED,
    "quantize_fp8_per_tensor": "none of its quantizations has one scale for all",
    "quantize_fp8_per_token": (
        "a row of zeros gets a scale of 0, and among few rows codes of 448 (the op's contract: "
        "the scale of an amax of 1e-10, codes of 0)"
    ),
    "quantize_int8_per_token": (
        "codes are cut, not rounded (the op's contract: nearest_even), in groups of at most 128"
    ),
    "rms_norm_backward": _GRADIENTS,
    "rms_norm_quant_fp8": "none of its norms quantizes",
    "rms_norm_quant_fp8_per_group": "none of its norms quantizes",
    "rms_norm_quant_fp8_per_tensor": "none of its norms quantizes",
    "sample_top_k_top_p": "none of its kernels for NVIDIA GPUs draws",
    "silu_and_mul_backward": _GRADIENTS,
    "silu_and_mul_quant_fp8": (
        "silu is rounded before it is multiplied (the op's contract: once), and groups are of at "
        "most 128"
    ),
    "silu_and_mul_quant_fp8_per_group": (
        "silu is rounded before it is multiplied (the op's contract: once)"
    ),
    "silu_and_mul_quant_fp8_per_tensor": "none of its gates quantizes by one scale",
    "top_k_renorm_probs": (
        "all that equal the k-th are kept (the op's contract: k of them, the lowest indices first)"
    ),
    "top_p_renorm_probs": (
        "all that equal the last are kept, by masses added in float32 (the op's contract: the "
        "lowest indices first, by exact masses)"
    ),
    "varlen_attention": _ATTENTION,
    "varlen_attention_with_lse": _ATTENTION,
}


def available() -> str | None:
    """Whether the package is there; that its library loads shows at the first run."""
    return lacking("sgl_kernel", "sglang-kernel", "0.4.6", "0.5")
