"""Own kernels, written in Triton: for NVIDIA and AMD GPUs, and for the interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os

import torch

from torch_ops.platform import Platform, Requirement

__all__ = ["available", "batch_invariant", "requires", "untestable"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


class _Interpreter(Requirement):
    """A CPU, where Triton was told to interpret kernels before it was imported."""

    def rejects(self, platform: Platform) -> str | None:
        if platform.device == "cpu" and not _INTERPRETED:
            return (
                "on a CPU Triton kernels run in its interpreter alone, for tests "
                "(set TRITON_INTERPRET=1 before Python starts)"
            )
        return super().rejects(platform)


requires = frozenset({Requirement.cuda(min_arch=(8, 0)), Requirement.rocm(), _Interpreter("cpu")})
batch_invariant = frozenset(
    {
        "apply_rope", "apply_rope_", "apply_rope_append_paged_kv_", "gelu_and_mul",
        "gelu_tanh_and_mul", "merge_state",
        "quantize_fp8_per_group", "quantize_fp8_per_token", "quantize_int8_per_token",
        "silu_and_mul", "topk_softmax",
    }
)  # fmt: skip
"""Elementwise kernels, chosen by the length of a row, and quantizations, which reduce a row to its
largest magnitude, in any order the same; norms and attention count rows, too."""


def available() -> str | None:
    """Triton is an optional dependency; every version that supported torch releases pin will do."""
    if importlib.util.find_spec("triton") is None:
        return "not installed: no module named 'triton'; install it: pip install triton"
    return None


def untestable(op: str, dtype: torch.dtype) -> str | None:
    """Give why a run on this machine says nothing about a dtype, or None."""
    if _INTERPRETED and "fp8" in op:
        return f"{op}: Triton's interpreter loses the carry of a rounding to float8"
    if _INTERPRETED and dtype == torch.bfloat16:
        return f"{op}: Triton's interpreter truncates torch.bfloat16 where a GPU rounds"
    return None
