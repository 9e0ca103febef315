"""AITER's kernels, for AMD's gfx942 and gfx950: compiled by hipcc at their first use.

Functions and limits were read in its sources of July to September 2026, and never ran here: a test
holds the adapters to the signatures. It rounds results to bfloat16 on gfx950 alone.
"""

from __future__ import annotations

from torch_ops.installed import lacking
from torch_ops.platform import Requirement

__all__ = ["available", "declined", "requires"]

_ATTENTION = (
    "probabilities are cut, not rounded, to float16, and to bfloat16 as its build was told (the "
    "op's bound: one rounding)"
)
_PAGED = "its tables of pages have a row for each sequence: making them of packed lists reads them"
_ROPE = "cosines and sines are tables of their own: the cache would be taken apart at every call"
_UNROUNDED = "what is quantized isn't rounded before (the op's contract: quantized as rounded)"

_GRADIENTS = "none of its kernels gives gradients"
_NORM_GRADIENTS = (
    "its gradients of norms take the inverse roots that a forward of their own stores (the op: x)"
)

requires = frozenset({Requirement.rocm(["gfx942", "gfx950"])})
declined = {
    "apply_rope": _ROPE,
    "apply_rope_": _ROPE,
    "apply_rope_append_paged_kv_": _ROPE,
    "attention": _ATTENTION,
    "attention_backward": _GRADIENTS,
    "attention_with_lse": _ATTENTION,
    "fused_add_rms_norm_quant_fp8": _UNROUNDED,
    "fused_add_rms_norm_quant_fp8_per_group": _UNROUNDED,
    "fused_add_rms_norm_quant_fp8_per_tensor": _UNROUNDED,
    "fused_experts": (
        "what experts give is added in the dtype of x, as it comes (the op's contract: in float32)"
    ),
    "gelu_and_mul_backward": _GRADIENTS,
    "gelu_tanh_and_mul_backward": _GRADIENTS,
    "layer_norm": "whether it rounds or cuts results is decided by flags of its build",
    "layer_norm_backward": _NORM_GRADIENTS,
    "merge_state": "none of its kernels merges states by their LSEs",
    "min_p_filter": "none of its kernels filters by min-p",
    "mla_decode": _PAGED,
    "moe_align_block_size": (
        "an expert's assignments lie as threads get to them (the op's contract: ascending)"
    ),
    "paged_decode": _PAGED,
    "paged_prefill": _PAGED,
    "quantize_fp8_per_token": (
        "a row of zeros gets a scale of 0 (the op's contract: the scale of an amax of 1e-10)"
    ),
    "quantize_int8_per_token": "codes are cut, not rounded (the op's contract: nearest_even)",
    "rms_norm_backward": _NORM_GRADIENTS,
    "rms_norm_quant_fp8": _UNROUNDED,
    "rms_norm_quant_fp8_per_group": _UNROUNDED,
    "rms_norm_quant_fp8_per_tensor": _UNROUNDED,
    "sample_top_k_top_p": (
        "rows are drawn by rejection, by a generator without a seed for each row (the op's "
        "contract: one number of 62 bits for a row, of its seed and offset)"
    ),
    "silu_and_mul_backward": _GRADIENTS,
    "silu_and_mul_quant_fp8": _UNROUNDED,
    "silu_and_mul_quant_fp8_per_group": _UNROUNDED,
    "silu_and_mul_quant_fp8_per_tensor": _UNROUNDED,
    "top_k_renorm_probs": (
        "all that equal the k-th are kept (the op's contract: k of them, the lowest indices first)"
    ),
    "top_p_renorm_probs": "none of its kernels filters by top-p without drawing",
    "topk_softmax": (
        "a row with NaN gives an expert more than once, and equal probabilities aren't ordered by "
        "their logits (the op's contract: distinct ids, ordered by logits)"
    ),
    "varlen_attention": _ATTENTION,
    "varlen_attention_with_lse": _ATTENTION,
}


def available() -> str | None:
    """Whether the package is there; that its kernels compile shows at their first run."""
    install = "install a release of ROCm/aiter from GitHub"
    return lacking("aiter", "amd-aiter", "0.1.19", "0.2", install)
