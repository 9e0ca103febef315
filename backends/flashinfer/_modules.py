"""FlashInfer's compiled functions, loaded or compiled once; what fails there fails explained."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.once import once

__all__ = ["activation", "cascade", "norm", "package", "pdl", "product", "rope"]


def package(name: str) -> Any:
    """Import a part of FlashInfer; what it warns of at its import is no fault of the caller."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"flashinfer.{name}")


@functools.cache
def norm(function: str) -> Callable[..., None]:
    """Give a function of the module of norms: its CUDA kernels, whether or not CuTe is there."""
    made = once(
        ("flashinfer", "norm"),
        "FlashInfer's norms",
        lambda: package("norm").get_norm_module(),
    )
    return getattr(made, function)  # type: ignore[no-any-return]


@functools.cache
def activation(name: str) -> Callable[..., None]:
    """Give ``(out, x, enable_pdl)`` of a gated activation: silu, gelu or gelu_tanh."""
    made = once(
        ("flashinfer", "activation", name),
        f"FlashInfer's {name}_and_mul",
        lambda: package("activation").get_act_and_mul_module(name),
    )
    return getattr(made, f"{name}_and_mul")  # type: ignore[no-any-return]


@functools.cache
def rope() -> Callable[..., None]:
    """Give ``(q, k, q_out, k_out, cos_sin_cache, positions, interleave)``."""
    made = once(
        ("flashinfer", "rope"),
        "FlashInfer's rotary embedding",
        lambda: package("rope").get_rope_module(),
    )
    return made.apply_rope_pos_ids_cos_sin_cache  # type: ignore[no-any-return]


@functools.cache
def cascade() -> Callable[..., None]:
    """Give ``(v_a, s_a, v_b, s_b, v, s)``, of which the last two are written; LSEs in base 2."""
    made = once(
        ("flashinfer", "cascade"),
        "FlashInfer's merge of states",
        lambda: package("cascade").get_cascade_module(),
    )
    return made.merge_state  # type: ignore[no-any-return]


@functools.cache
def product() -> Callable[..., None]:
    """Give ``(a, b, out, scale_a, scale_b, workspace, handle)``: cuBLASLt's product of float8."""
    made = once(
        ("flashinfer", "gemm"),
        "FlashInfer's products of matrices",
        lambda: package("jit.gemm").gen_gemm_module().build_and_load(),
    )
    return made.bmm_fp8  # type: ignore[no-any-return]


def pdl(x: Tensor) -> bool:
    """Whether a launch may overlap with the end of the one before it, as FlashInfer's own do."""
    return _overlaps(x.get_device())


@functools.cache
def _overlaps(index: int) -> bool:
    return index >= 0 and torch.cuda.get_device_capability(index) >= (9, 0)
