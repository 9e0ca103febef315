"""The declared orders: whoever changes one changes what runs, and says so in the changelog."""

from __future__ import annotations

import pytest

from torch_ops.declarations import catalogue

ORDERS = {
    "cpu": ("torch", "inductor"),
    "cuda": ("triton", "flashinfer", "sgl_kernel", "torch", "inductor"),
    "rocm": ("aiter", "triton", "torch", "inductor"),
}
OPS = (
    "append_paged_kv_", "apply_rope", "apply_rope_", "attention", "attention_with_lse",
    "fused_add_rms_norm", "fused_add_rms_norm_", "fused_experts", "gelu_and_mul",
    "gelu_tanh_and_mul", "gemma_rms_norm", "layer_norm", "merge_state", "moe_align_block_size",
    "paged_decode", "paged_prefill", "rms_norm", "silu_and_mul", "topk_softmax", "varlen_attention",
    "varlen_attention_with_lse",
)  # fmt: skip


def test_every_op_is_pinned() -> None:
    assert sorted(catalogue()) == sorted(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_declared_order(op: str) -> None:
    assert dict(catalogue()[op].order) == ORDERS
