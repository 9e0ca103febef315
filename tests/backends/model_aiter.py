"""A model of AITER on the CPU: functions with its signatures, as picky as its kernels."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from . import math64

HALVES = (torch.float16, torch.bfloat16)
ALL = (torch.float32, *HALVES)


class Recorded(NamedTuple):
    """A function as AITER has it.

    Attributes:
        file: Where it is, in ROCm/aiter.
        commit: Of which it was read.
        parameters: Names and defaults.
    """

    file: str
    commit: str
    parameters: str


_NORMS = ("aiter/ops/rmsnorm.py", "0bc300f740e8ac412deb6bc68c23f7a9e582413c")
_QUANT = ("aiter/ops/quant.py", "0164c2ff67d6e31b3848f4f33e96390a79192021")
_GATES = ("aiter/ops/activation.py", "0f19c65614522324a46117eebeae4b7f4f1e2798")
RECORDED = {
    "rms_norm": Recorded(*_NORMS, "input, weight, epsilon, use_model_sensitive_rmsnorm=0"),
    "rmsnorm": Recorded(*_NORMS, "out, input, weight, epsilon, gemma_norm=False"),
    "fused_add_rms_norm_cu": Recorded(*_NORMS, "input, residual_in, weight, epsilon"),
    "rmsnorm2d_fwd_with_add": Recorded(
        *_NORMS,
        "out, input, residual_in, residual_out, weight, epsilon, gemma_norm=False, "
        "use_model_sensitive_rmsnorm=0",
    ),
    "silu_and_mul": Recorded(*_GATES, "out, input"),
    "gelu_and_mul": Recorded(*_GATES, "out, input"),
    "gelu_tanh_and_mul": Recorded(*_GATES, "out, input"),
    "per_group_quant_hip": Recorded(
        *_QUANT,
        "x, scale=None, quant_dtype=torch.int8, group_size=128, transpose_scale=False, "
        "num_rows=None, num_rows_factor=1, scale_type=torch.float32, scale_layout_m32k4=False",
    ),
    "static_per_tensor_quant": Recorded(*_QUANT, "out, input, scale"),
    "reshape_and_cache_flash": Recorded(
        "aiter/ops/cache.py",
        "0590d9a96e6df8008022a604a310b8d8cba82ec6",
        "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale",
    ),
    "gemm_a8w8": Recorded(
        "aiter/ops/gemm_op_a8w8.py",
        "0006ebde8a078bb8bef51dd28db28dc2822f9c62",
        "XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, splitK=None",
    ),
}


class Model:
    """The package; `called` holds what ran, with what it got besides tensors."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the package where imports find it."""
        package = ModuleType("aiter")
        vars(package).update({name: getattr(self, name) for name in RECORDED})
        monkeypatch.setitem(sys.modules, "aiter", package)

    def rms_norm(
        self, input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
    ) -> Tensor:
        assert not use_model_sensitive_rmsnorm  # it would round before the weight
        _rows(ALL, input, weight)
        self.called.append(("rms_norm", epsilon))
        return math64.rms(input, weight.double(), epsilon).to(input.dtype)

    def rmsnorm(
        self, out: Tensor, input: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool = False
    ) -> None:
        assert input.shape[1] <= 8192
        _rows(HALVES, input, weight, out)
        self.called.append(("rmsnorm", epsilon, gemma_norm))
        out.copy_(math64.rms(input, gemma_norm + weight.double(), epsilon))

    def fused_add_rms_norm_cu(
        self, input: Tensor, residual_in: Tensor, weight: Tensor, epsilon: float
    ) -> None:
        self.rmsnorm2d_fwd_with_add(input, input, residual_in, residual_in, weight, epsilon)
        self.called[-1] = ("fused_add_rms_norm_cu", epsilon)

    def rmsnorm2d_fwd_with_add(
        self, out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor,
        weight: Tensor, epsilon: float, gemma_norm: bool = False,
        use_model_sensitive_rmsnorm: int = 0,
    ) -> None:  # fmt: skip
        assert input.dtype is torch.float32  # the sum that is normalized is the one that is stored
        assert not use_model_sensitive_rmsnorm
        _rows(ALL, input, weight, out, residual_in, residual_out)
        self.called.append(("rmsnorm2d_fwd_with_add", epsilon, gemma_norm))
        total = input + residual_in
        residual_out.copy_(total)
        out.copy_(math64.rms(total, gemma_norm + weight.double(), epsilon))

    def _gated(self, name: str, out: Tensor, input: Tensor) -> None:
        assert input.dtype in ALL
        assert input.is_contiguous()
        assert out.is_contiguous()
        assert out.shape[-1] * input.element_size() % 16 == input.data_ptr() % 16 == 0
        self.called.append((f"{name}_and_mul",))
        gate, value = input.chunk(2, -1)
        out.copy_(math64.activated(name, gate) * value.double())

    def silu_and_mul(self, out: Tensor, input: Tensor) -> None:
        self._gated("silu", out, input)

    def gelu_and_mul(self, out: Tensor, input: Tensor) -> None:
        self._gated("gelu", out, input)

    def gelu_tanh_and_mul(self, out: Tensor, input: Tensor) -> None:
        self._gated("gelu_tanh", out, input)

    def per_group_quant_hip(
        self, x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype = torch.int8,
        group_size: int = 128, transpose_scale: bool = False, num_rows: Tensor | None = None,
        num_rows_factor: int = 1, scale_type: torch.dtype = torch.float32,
        scale_layout_m32k4: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert scale is num_rows is None
        assert not transpose_scale
        assert not scale_layout_m32k4
        assert (num_rows_factor, scale_type) == (1, torch.float32)
        assert group_size in (32, 64, 128)
        assert x.dtype in HALVES
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
        self.called.append(("per_group_quant_hip", quant_dtype, group_size))
        groups = x.float().view(-1, group_size)
        largest = torch.tensor(torch.finfo(quant_dtype).max)
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / largest)
        codes = (groups * (1 / scales)).clamp(-largest, largest).to(quant_dtype)
        return codes.view(x.shape), scales.view(*x.shape[:-1], -1)

    def static_per_tensor_quant(self, out: Tensor, input: Tensor, scale: Tensor) -> None:
        assert input.dtype in HALVES
        assert scale.dtype is torch.float32
        assert scale.numel() == 1
        assert input.is_contiguous()
        assert out.is_contiguous()
        assert input.shape[-1] % 16 == input.data_ptr() % 16 == 0
        self.called.append(("static_per_tensor_quant",))
        limit = torch.finfo(out.dtype).max
        out.copy_((input.float() * (1 / scale)).clamp(-limit, limit))

    def reshape_and_cache_flash(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
        slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
    ) -> None:  # fmt: skip
        assert kv_cache_dtype == "auto"  # that of the keys
        assert k_scale.dtype is v_scale.dtype is torch.float32
        assert slot_mapping.dtype is torch.int64
        assert slot_mapping.is_contiguous()
        assert key_cache.stride(0) == value_cache.stride(0) or key_cache.shape[0] == 1
        assert key.shape == value.shape
        self.called.append(("reshape_and_cache_flash",))
        for rows, cache in ((key, key_cache), (value, value_cache)):
            assert rows.dtype in ALL
            assert rows[0].is_contiguous()
            assert cache[0].is_contiguous()
            for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
                if slot >= 0:
                    cache[slot // cache.shape[1], slot % cache.shape[1]] = row

    def gemm_a8w8(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16, splitK: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert bias is None
        assert splitK == 0  # parts would be added in the dtype of the result
        assert XQ.dtype is WQ.dtype
        assert XQ.dtype in (torch.int8, torch.float8_e4m3fn)
        assert XQ.is_contiguous()
        assert WQ.is_contiguous()
        assert XQ.shape[1] % 256 == WQ.shape[0] % 16 == 0
        assert x_scale.shape == (XQ.shape[0], 1)
        assert w_scale.shape == (1, WQ.shape[0])
        assert x_scale.is_contiguous()
        assert w_scale.is_contiguous()
        self.called.append(("gemm_a8w8", dtype))
        return (XQ.double() @ WQ.double().T * x_scale.double() * w_scale.double()).to(dtype)


def _rows(dtypes: tuple[torch.dtype, ...], x: Tensor, weight: Tensor, *others: Tensor) -> None:
    assert x.dtype in dtypes
    assert weight.shape == x.shape[1:]
    for tensor in (x, weight, *others):
        assert tensor.dtype is x.dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
    for rows in (x, *others):
        assert rows.dim() == 2
        assert rows.shape == x.shape
    assert x.shape[1] * x.element_size() % 16 == 0
