"""The declared orders: whoever changes one changes what runs, and says so in the changelog."""

from __future__ import annotations

import pytest

from torch_ops.declarations import catalogue

ORDERS = {
    "cpu": ("torch", "inductor"),
    "cuda": ("triton", "flashinfer", "sgl_kernel", "torch", "inductor"),
    "rocm": ("aiter", "triton", "torch", "inductor"),
}
MEASURED = {
    # On an H200 Triton's product of float8 takes 1.4 times as long as these for many rows.
    "scaled_mm_fp8": {"cuda": ("sgl_kernel", "torch", "triton", "inductor")},
    "scaled_mm_int8": {"cuda": ("sgl_kernel", "torch", "triton", "inductor")},
}
OPS = (
    "append_paged_kv_", "apply_rope", "apply_rope_", "apply_rope_append_paged_kv_", "attention",
    "attention_backward", "attention_with_lse", "fused_add_rms_norm", "fused_add_rms_norm_",
    "fused_add_rms_norm_quant_fp8", "fused_add_rms_norm_quant_fp8_per_group",
    "fused_add_rms_norm_quant_fp8_per_tensor", "fused_experts", "gelu_and_mul",
    "gelu_and_mul_backward", "gelu_tanh_and_mul", "gelu_tanh_and_mul_backward",
    "gemma_fused_add_rms_norm", "gemma_rms_norm", "layer_norm", "layer_norm_backward",
    "merge_state", "min_p_filter", "mla_decode", "moe_align_block_size", "paged_decode",
    "paged_prefill", "quantize_fp8_per_group", "quantize_fp8_per_tensor", "quantize_fp8_per_token",
    "quantize_int8_per_token", "rms_norm", "rms_norm_backward", "rms_norm_quant_fp8",
    "rms_norm_quant_fp8_per_group", "rms_norm_quant_fp8_per_tensor", "sample_top_k_top_p",
    "scaled_mm_fp8", "scaled_mm_int8", "silu_and_mul", "silu_and_mul_backward",
    "silu_and_mul_quant_fp8", "silu_and_mul_quant_fp8_per_group",
    "silu_and_mul_quant_fp8_per_tensor", "top_k_renorm_probs", "top_p_renorm_probs", "topk_softmax",
    "varlen_attention", "varlen_attention_with_lse",
)  # fmt: skip


def test_every_op_is_pinned() -> None:
    assert sorted(catalogue()) == sorted(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_declared_order(op: str) -> None:
    assert dict(catalogue()[op].order) == ORDERS | MEASURED.get(op, {})
