"""A model of sglang-kernel 0.4.6 on the CPU: operators with the schemas of its library."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from . import math64

NORMS = (torch.float16, torch.bfloat16)
ALL = (torch.float32, *NORMS)
SCHEMAS = (
    "rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "gemma_rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, "
    "bool enable_pdl) -> ()",
    "gemma_fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, "
    "bool enable_pdl) -> ()",
    "fp8_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
    "ScalarType out_dtype, Tensor? bias) -> Tensor",
    "int8_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
    "ScalarType out_dtype, Tensor? bias) -> Tensor",
    "silu_and_mul(Tensor! out, Tensor input) -> ()",
    "gelu_and_mul(Tensor! out, Tensor input) -> ()",
    "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
    "merge_state_v2(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor! v_merged, "
    "Tensor! s_merged) -> ()",
    "sgl_per_token_group_quant_8bit_v2(Tensor input, Tensor! output_q, Tensor! output_s, "
    "int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, "
    "bool fuse_silu_and_mul, Tensor? masked_m) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox) -> ()",
    "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor gating_output, "
    "bool renormalize, float moe_softcapping, Tensor? correction_bias) -> ()",
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, "
    "Tensor block_table, float softmax_scale, bool is_causal, Tensor? tile_scheduler_metadata, "
    "Tensor? num_splits) -> (Tensor, Tensor, Tensor?, Tensor?)",
)
_library = torch.library.Library("sgl_kernel_model", "DEF")


class Model:
    """The package; `called` holds what ran, with what it got besides tensors."""

    called: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.called = _called
        _called.clear()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the package where imports find it, and its operators where PyTorch has them."""
        for name in ("sgl_kernel", "sgl_kernel.flashmla_ops"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(torch.ops, "sgl_kernel", torch.ops.sgl_kernel_model, raising=False)


_called: list[tuple[Any, ...]] = []


def _rows(x: Tensor, other: Tensor, weight: Tensor) -> None:
    assert x.dtype in NORMS
    assert x.dtype is other.dtype is weight.dtype
    assert x.dim() == other.dim() == 2
    assert x.shape == other.shape
    vector = math.gcd(16, x.shape[1] * x.element_size())
    for rows in (x, other):
        assert rows.stride(1) == 1
        assert rows.data_ptr() % vector == 0
        assert rows.shape[0] == 1 or rows.stride(0) * x.element_size() % vector == 0
    assert weight.is_contiguous()
    assert weight.data_ptr() % vector == 0


def rmsnorm(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    _rows(input, output, weight)
    _called.append(("rmsnorm", eps, enable_pdl))
    output.copy_(math64.rms(input, weight.double(), eps))


def gemma_rmsnorm(
    output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool
) -> None:
    _rows(input, output, weight)
    _called.append(("gemma_rmsnorm", eps, enable_pdl))
    output.copy_(math64.rms(input, 1 + weight.double(), eps))


def _fused(name: str, dtypes: tuple[torch.dtype, ...], plus: float) -> Any:
    def run(input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        assert input.dtype in dtypes
        assert input.dtype is residual.dtype is weight.dtype
        vector = math.gcd(16, input.shape[1] * input.element_size())
        for tensor in (input, residual, weight):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % vector == 0
        _called.append((name, eps, enable_pdl))
        # In float32 the sum that is normalized is the one that is stored.
        total = input.float() + residual.float()
        residual.copy_(total)
        input.copy_(math64.rms(total, plus + weight.double(), eps))

    return run


def _gated(name: str) -> Any:
    def run(out: Tensor, input: Tensor) -> None:
        assert input.dtype in ALL
        assert input.is_contiguous()
        assert out.is_contiguous()
        assert out.shape[-1] * input.element_size() % 16 == 0
        assert input.data_ptr() % 16 == 0
        _called.append((f"{name}_and_mul",))
        gate, value = input.chunk(2, -1)
        out.copy_(math64.activated(name, gate) * value.double())

    return run


def _product(name: str, dtype: torch.dtype) -> Any:
    def run(
        mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert mat_a.dtype is mat_b.dtype is dtype
        assert out_dtype in NORMS
        assert mat_a.stride() == (mat_a.shape[1], 1)
        assert mat_b.stride() == (1, mat_a.shape[1])
        assert mat_a.shape[1] % 16 == mat_b.shape[1] % 8 == 0
        assert scales_a.numel() == mat_a.shape[0]
        assert scales_b.numel() == mat_b.shape[1]
        assert scales_a.is_contiguous()
        assert scales_b.is_contiguous()
        assert scales_a.dtype is scales_b.dtype is torch.float32
        assert bias is None or bias.dtype is out_dtype
        _called.append((name,))
        total = mat_a.double() @ mat_b.double() * scales_a.double().view(-1, 1) * scales_b.double()
        return (total if bias is None else total + bias.double()).to(out_dtype)

    return run


def merge_state_v2(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v_merged: Tensor, s_merged: Tensor
) -> None:
    assert all(t.is_contiguous() for t in (v_a, s_a, v_b, s_b))
    _called.append(("merge_state_v2",))
    results = math64.merged(v_a, s_a, v_b, s_b, math.e)
    for out, result in zip((v_merged, s_merged), results, strict=True):
        out.copy_(result)


def sgl_per_token_group_quant_8bit_v2(
    input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, eps: float,
    fp8_min: float, fp8_max: float, scale_ue8m0: bool, fuse_silu_and_mul: bool,
    masked_m: Tensor | None,
) -> None:  # fmt: skip
    assert input.dtype in NORMS
    assert input.dim() == output_s.dim() == 2
    assert all(t.is_contiguous() for t in (input, output_q, output_s))
    assert input.data_ptr() % 16 == 0
    assert group_size in (16, 32, 64, 128)
    assert (eps, fp8_min, fp8_max) == (1e-10, -448, 448)
    assert not scale_ue8m0
    assert not fuse_silu_and_mul
    assert masked_m is None
    _called.append(("sgl_per_token_group_quant_8bit_v2", group_size))
    groups = input.float().unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=eps)
    output_s.copy_(amax.squeeze(-1) * (1 / torch.tensor(fp8_max)))
    codes = (groups * (fp8_max / amax)).clamp(fp8_min, fp8_max)
    output_q.copy_(codes.flatten(-2))


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:  # fmt: skip
    assert key is not None
    assert positions.dtype is torch.int64
    assert cos_sin_cache.dtype is query.dtype is key.dtype  # it is read in the dtype of q
    assert cos_sin_cache.is_contiguous()
    assert positions.is_contiguous()
    assert query.shape[2] == key.shape[2] == head_size
    assert query.shape[1] % key.shape[1] == 0
    assert query.stride(2) == key.stride(2) == 1
    assert key.shape[1] == 1 or key.stride(1) == query.stride(1)
    _called.append(("rotary_embedding", is_neox))
    for x in (query, key):
        x.copy_(math64.rotated(x, cos_sin_cache, positions, is_neox))


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, gating_output: Tensor, renormalize: bool,
    moe_softcapping: float, correction_bias: Tensor | None,
) -> None:  # fmt: skip
    """As the library's: of equal probabilities the lower index, and NaN is never the larger."""
    assert gating_output.dtype in ALL
    assert gating_output.is_contiguous()
    assert gating_output.data_ptr() % 16 == 0
    assert topk_weights.dtype is torch.float32
    assert topk_indices.dtype is torch.int32
    assert moe_softcapping == 0.0
    assert correction_bias is None
    _called.append(("topk_softmax", renormalize))
    shares = torch.softmax(gating_output.double(), -1)
    ids = torch.sort(shares.float(), dim=-1, descending=True, stable=True).indices
    ids = ids[:, : topk_indices.shape[1]]
    weights = shares.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(ids)


def dense_decode_fwd(
    q: Tensor, kcache: Tensor, head_size_v: int, seqlens_k: Tensor, block_table: Tensor,
    softmax_scale: float, is_causal: bool, tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Rows without keys are NaN, as what is in memory may be."""
    batch, queries, heads, width = q.shape
    assert q.dtype in NORMS
    assert kcache.dtype is q.dtype
    assert (queries, width, head_size_v) == (1, 576, 512)
    assert kcache.shape[1:] == (64, 1, 576)
    assert kcache.stride(3) == q.stride(3) == 1
    assert (kcache.stride(0) | kcache.stride(1)) % 8 == 0
    assert kcache.data_ptr() % 16 == 0
    assert seqlens_k.dtype is block_table.dtype is torch.int32
    assert seqlens_k.is_contiguous()
    assert seqlens_k.shape == (batch,)
    assert block_table.shape[0] == batch
    assert softmax_scale > 0
    assert tile_scheduler_metadata is num_splits is None
    _called.append(("dense_decode_fwd", block_table.tolist(), seqlens_k.tolist()))
    out = torch.full((batch, 1, heads, 512), torch.nan, dtype=q.dtype)
    for row, count in enumerate(seqlens_k.tolist()):
        keys = kcache[block_table[row].long()].flatten(0, 1)[:count]
        if count:
            found = math64.attended(q[row], keys, keys[..., :512], False, softmax_scale, -1)
            out[row] = found[0].to(q.dtype)
    return out, q.new_zeros(batch, heads, 1, dtype=torch.float32), None, None


_FUNCTIONS = {
    "topk_softmax": topk_softmax,
    "rmsnorm": rmsnorm,
    "gemma_rmsnorm": gemma_rmsnorm,
    "fused_add_rmsnorm": _fused("fused_add_rmsnorm", ALL, 0.0),
    "gemma_fused_add_rmsnorm": _fused("gemma_fused_add_rmsnorm", NORMS, 1.0),
    "fp8_scaled_mm": _product("fp8_scaled_mm", torch.float8_e4m3fn),
    "int8_scaled_mm": _product("int8_scaled_mm", torch.int8),
    "silu_and_mul": _gated("silu"),
    "gelu_and_mul": _gated("gelu"),
    "gelu_tanh_and_mul": _gated("gelu_tanh"),
    "merge_state_v2": merge_state_v2,
    "sgl_per_token_group_quant_8bit_v2": sgl_per_token_group_quant_8bit_v2,
    "rotary_embedding": rotary_embedding,
    "dense_decode_fwd": dense_decode_fwd,
}
for _schema in SCHEMAS:
    _library.define(_schema)
for _name, _function in _FUNCTIONS.items():
    _library.impl(_name, _function, "CPU")
