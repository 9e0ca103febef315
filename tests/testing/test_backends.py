"""The whole kit, CI profile, on every op of the backends that run anywhere."""

from __future__ import annotations

import pytest

from torch_ops.testing.proof import proof_names
from torch_ops.testing.verify import verify

# Some of what `torch-ops verify` runs: two dtypes of each op, one of those that share their parts,
# and of a backend that takes about a second to compile each class of calls one dtype of some ops,
# and few classes.
DTYPES = ("float32", "bfloat16")
ONE = {
    "fused_experts": "bfloat16", "moe_align_block_size": "int32",
    "apply_rope": "float32", "attention": "bfloat16", "fused_add_rms_norm": "bfloat16",
    "gelu_and_mul": "bfloat16", "layer_norm": "float32", "merge_state": "bfloat16",
    "apply_rope_": "bfloat16", "attention_backward": "bfloat16", "attention_with_lse": "float32",
    "fused_add_rms_norm_": "float32",
    "gelu_and_mul_backward": "float32", "gelu_tanh_and_mul_backward": "bfloat16",
    "silu_and_mul_backward": "float16", "rms_norm_backward": "bfloat16",
    "layer_norm_backward": "float32",
    "gelu_tanh_and_mul": "float32", "gemma_fused_add_rms_norm": "bfloat16",
    "gemma_rms_norm": "bfloat16", "scaled_mm_int8": "bfloat16",
    "append_paged_kv_": "bfloat16", "mla_decode": "bfloat16",
    "apply_rope_append_paged_kv_": "float16",
    "paged_decode": "float16", "paged_prefill": "float32",
    "min_p_filter": "float32", "sample_top_k_top_p": "float32", "top_k_renorm_probs": "float32",
    "top_p_renorm_probs": "float32",
    "fused_add_rms_norm_quant_fp8": "bfloat16", "quantize_fp8_per_group": "float16",
    "quantize_fp8_per_tensor": "float32", "quantize_fp8_per_token": "bfloat16",
    "quantize_int8_per_token": "float16", "rms_norm_quant_fp8": "float32",
    "silu_and_mul_quant_fp8": "float16",
    "rms_norm_quant_fp8_per_group": "bfloat16", "rms_norm_quant_fp8_per_tensor": "float16",
    "fused_add_rms_norm_quant_fp8_per_group": "float16",
    "fused_add_rms_norm_quant_fp8_per_tensor": "bfloat16",
    "silu_and_mul_quant_fp8_per_group": "bfloat16", "silu_and_mul_quant_fp8_per_tensor": "float32",
    "topk_softmax": "float16",
    "varlen_attention": "float64", "varlen_attention_with_lse": "bfloat16",
}  # fmt: skip
COMPILED = (
    ("rms_norm", "bfloat16"),
    pytest.param("fused_add_rms_norm_", "float64", marks=pytest.mark.exhaustive),
    pytest.param("gelu_and_mul", "float32", marks=pytest.mark.exhaustive),
    pytest.param("merge_state", "float16", marks=pytest.mark.exhaustive),
)  # fmt: skip
CLASSES = 2


# Others share their proofs' parts; each family of ops has one here.
PROVEN = (
    "append_paged_kv_", "apply_rope_append_paged_kv_", "attention", "fused_add_rms_norm_",
    "fused_experts", "layer_norm", "merge_state", "mla_decode", "moe_align_block_size",
    "paged_decode", "paged_prefill", "quantize_fp8_per_token", "rms_norm", "rms_norm_backward",
    "rms_norm_quant_fp8", "sample_top_k_top_p", "scaled_mm_fp8", "silu_and_mul", "topk_softmax",
    "varlen_attention",
)  # fmt: skip


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[] if op in PROVEN else [pytest.mark.exhaustive])
        for op in proof_names()
    ],
)
def test_the_reference_is_proven(op: str) -> None:
    dtypes = (ONE[op],) if op in ONE else DTYPES
    result = verify(op, "torch", dtypes=dtypes)
    assert result.ok, str(result)
    assert [cell.verdict for cell in result.cells] == ["passed"] * len(dtypes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", sorted(ONE))
def test_the_reference_is_proven_in_every_dtype(op: str) -> None:
    result = verify(op, "torch")
    assert result.ok, str(result)
    assert {cell.verdict for cell in result.cells} == {"passed"}


@pytest.mark.parametrize(("op", "dtype"), COMPILED)
def test_the_compiled_reference_is_proven(op: str, dtype: str) -> None:
    result = verify(op, "inductor", dtypes=(dtype,), max_classes=CLASSES)
    assert result.ok, str(result)
