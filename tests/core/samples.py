"""Small legal calls of every op, and ways to lay their tensors out in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.registry import registry

HIDDEN, PAGES = 16, 40
Arguments = dict[str, Any]


def _x(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, 2, HIDDEN, dtype=dtype)


def _vector(dtype: torch.dtype) -> Tensor:
    return torch.randn(HIDDEN, dtype=dtype)


def _norm(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype), "weight": _vector(dtype), "eps": 1e-5}


def _layer_norm(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype), "weight": _vector(dtype), "bias": _vector(dtype), "eps": 1e-6}


def _fused(rows: int, dtype: torch.dtype) -> Arguments:
    x, residual = _x(rows, dtype), _x(rows, dtype)
    return {"x": x, "residual": residual, "weight": _vector(dtype), "eps": 1e-5}


def _norm_gradient(rows: int, dtype: torch.dtype) -> Arguments:
    made = {"x": _x(rows, dtype), "grad": _x(rows, dtype), "weight": _vector(dtype)}
    return made | {"residual_grad": _x(rows, dtype), "eps": 1e-5, "one_plus": False}


def _layer_gradient(rows: int, dtype: torch.dtype) -> Arguments:
    made = {"x": _x(rows, dtype), "grad": _x(rows, dtype)}
    return made | {"weight": _vector(dtype), "bias": _vector(dtype), "eps": 1e-6}


def _gate(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": _x(rows, dtype)}


def _gate_gradient(rows: int, dtype: torch.dtype) -> Arguments:
    x = _x(rows, dtype)
    return {"x": x, "grad": torch.randn_like(x[..., : x.shape[-1] // 2])}


def _quantize_groups(rows: int, dtype: torch.dtype) -> Arguments:
    return {"x": torch.randn(rows, 2, 128, dtype=dtype), "group_size": 8}


def _in_groups(rows: int, dtype: torch.dtype, *names: str) -> Arguments:
    found = {name: torch.randn(rows, 2, 128, dtype=dtype) for name in names}
    return {**found, "weight": torch.randn(128, dtype=dtype), "eps": 1e-5, "group_size": 8}


def _by_scale(args: Arguments) -> Arguments:
    """With a scale, before a number."""
    numbers = {name: args.pop(name) for name in ("eps",) if name in args}
    return {**args, "scale": torch.rand(1) + 0.5, **numbers}


def _rope(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(rows, 4, HIDDEN, dtype=dtype),
        "k": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "cos_sin_cache": torch.randn(32, 8),
        "positions": torch.arange(rows, dtype=torch.int32),
        "is_neox": True,
    }


def _attention(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(rows, 3, 4, HIDDEN, dtype=dtype),
        "k": torch.randn(rows, 5, 2, HIDDEN, dtype=dtype),
        "v": torch.randn(rows, 5, 2, HIDDEN, dtype=dtype),
        "is_causal": True,
        "scale": None,
        "window_left": -1,
        "logits_soft_cap": 0.0,
    }


def _attention_gradient(rows: int, dtype: torch.dtype) -> Arguments:
    """With what forward leaves for these q, k and v."""
    made = _attention(rows, dtype)
    out, lse = catalogue()["attention_with_lse"].reference(*made.values())
    left = {
        "out": out,
        "lse": lse,
        "grad": torch.randn_like(out),
        "grad_lse": torch.randn_like(lse),
    }
    return {**{n: made.pop(n) for n in ("q", "k", "v")}, **left, **made}


def _merge(rows: int, dtype: torch.dtype) -> Arguments:
    return {
        "v_a": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "s_a": torch.randn(rows, 2),
        "v_b": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "s_b": torch.randn(rows, 2),
    }


def _probs(rows: int, dtype: torch.dtype, *names: str) -> Arguments:
    """Rows of probabilities, and numbers between those that do nothing and those that keep one."""
    made = {
        "k": (torch.arange(rows) + 1).int(),
        "p": torch.linspace(0.2, 0.9, rows),
        "min_p": torch.linspace(0.1, 0.6, rows),
        "seed": torch.arange(rows) * 3**30 - 7,
        "offset": torch.arange(rows) * 5,
    }
    probs = torch.randn(rows, HIDDEN, dtype=dtype).softmax(-1)
    return {"probs": probs, **{name: made[name] for name in names}}


NUMBERS = {"scale": None, "window_left": -1, "logits_soft_cap": 0.0}


def _indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _varlen(rows: int, dtype: torch.dtype) -> Arguments:
    """As many sequences, of one query and two keys."""
    return {
        "q": torch.randn(rows, 4, HIDDEN, dtype=dtype),
        "k": torch.randn(2 * rows, 2, HIDDEN, dtype=dtype),
        "v": torch.randn(2 * rows, 2, HIDDEN, dtype=dtype),
        "qo_indptr": _indices(*range(rows + 1)),
        "kv_indptr": _indices(*range(0, 2 * rows + 1, 2)),
        "max_qo_len": 1,
        "max_kv_len": 2,
        "is_causal": True,
        **NUMBERS,
    }


def _pages(rows: int, dtype: torch.dtype) -> Arguments:
    """As many sequences of a page each, the first of one token, and pages of nobody."""
    return {
        "q": torch.randn(rows, 4, HIDDEN, dtype=dtype),
        "k_cache": torch.randn(PAGES, 4, 2, HIDDEN, dtype=dtype),
        "v_cache": torch.randn(PAGES, 4, 2, HIDDEN, dtype=dtype),
        "kv_indptr": _indices(*range(rows + 1)),
        "kv_indices": _indices(*range(PAGES - 1, PAGES - 1 - rows, -1)),
        "kv_last_page_len": _indices(*(1 + i % 4 for i in range(rows))),
    }


def _latents(rows: int, dtype: torch.dtype) -> Arguments:
    """Pages as those of `_pages`, of latents and of rotated parts."""
    table = {name: made for name, made in _pages(rows, dtype).items() if name.startswith("kv_")}
    return {
        "q_nope": torch.randn(rows, 4, HIDDEN, dtype=dtype),
        "q_pe": torch.randn(rows, 4, 6, dtype=dtype),
        "ckv_cache": torch.randn(PAGES, 4, HIDDEN, dtype=dtype),
        "kpe_cache": torch.randn(PAGES, 4, 6, dtype=dtype),
        **table,
        "scale": 0.25,
    }


def _decode(rows: int, dtype: torch.dtype) -> Arguments:
    return _pages(rows, dtype) | NUMBERS


def _prefill(rows: int, dtype: torch.dtype) -> Arguments:
    made = _pages(rows, dtype)
    first = {name: made.pop(name) for name in ("q", "k_cache", "v_cache")}
    bounds = _indices(*range(rows + 1))
    return first | {"qo_indptr": bounds} | made | {"is_causal": True} | NUMBERS


def _append(rows: int, dtype: torch.dtype) -> Arguments:
    """A row that is skipped, and others three slots apart."""
    return {
        "k": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "v": torch.randn(rows, 2, HIDDEN, dtype=dtype),
        "k_cache": torch.randn(PAGES, 4, 2, HIDDEN, dtype=dtype),
        "v_cache": torch.randn(PAGES, 4, 2, HIDDEN, dtype=dtype),
        "slot_mapping": 3 * torch.arange(rows) - 3,
    }


def _rope_append(rows: int, dtype: torch.dtype) -> Arguments:
    """Arguments of both ops."""
    turned, written = _rope(rows, dtype), _append(rows, dtype)
    names = catalogue()["apply_rope_append_paged_kv_"].signature.parameters
    return {name: (turned | written)[name] for name in names}


def _product(kind: torch.dtype) -> Callable[[int, torch.dtype], Arguments]:
    def make(rows: int, dtype: torch.dtype) -> Arguments:
        return {
            "a": (4 * torch.randn(rows, 32)).to(kind),
            "b": (4 * torch.randn(HIDDEN, 32)).to(kind).t(),
            "scale_a": torch.rand(rows, 1),
            "scale_b": torch.rand(1, HIDDEN),
            "out_dtype": dtype,
            "bias": torch.randn(HIDDEN, dtype=dtype),
        }

    return make


def _routing(rows: int, dtype: torch.dtype) -> Arguments:
    return {"logits": torch.randn(rows, HIDDEN, dtype=dtype), "k": 3, "renormalize": True}


def _experts(rows: int, dtype: torch.dtype) -> Arguments:
    """Four experts, two a token; the first token has one alone."""
    ids = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) % 4
    ids[:1, 1] = -1
    return {
        "x": torch.randn(rows, HIDDEN, dtype=dtype),
        "w_gate_up": torch.randn(4, 12, HIDDEN, dtype=dtype) / 4,
        "w_down": torch.randn(4, HIDDEN, 6, dtype=dtype) / 4,
        "weights": torch.rand(rows, 2),
        "ids": ids,
    }


def _align(rows: int, _: torch.dtype) -> Arguments:
    """Four experts and an id of none, two a token."""
    ids = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) % 5 - 1
    return {"ids": ids, "num_experts": 4, "block_size": 3}


MAKERS: dict[str, Callable[[int, torch.dtype], Arguments]] = {
    "append_paged_kv_": _append,
    "apply_rope": _rope,
    "apply_rope_": _rope,
    "apply_rope_append_paged_kv_": _rope_append,
    "attention": _attention,
    "attention_backward": _attention_gradient,
    "attention_with_lse": _attention,
    "fused_add_rms_norm": _fused,
    "fused_add_rms_norm_quant_fp8": _fused,
    "fused_add_rms_norm_": _fused,
    "gemma_fused_add_rms_norm": _fused,
    "fused_experts": _experts,
    "gelu_and_mul": _gate,
    "gelu_and_mul_backward": _gate_gradient,
    "gelu_tanh_and_mul": _gate,
    "gelu_tanh_and_mul_backward": _gate_gradient,
    "gemma_rms_norm": _norm,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_gradient,
    "merge_state": _merge,
    "min_p_filter": lambda rows, dtype: _probs(rows, dtype, "min_p"),
    "mla_decode": _latents,
    "moe_align_block_size": _align,
    "paged_decode": _decode,
    "paged_prefill": _prefill,
    "quantize_fp8_per_group": _quantize_groups,
    "quantize_fp8_per_tensor": lambda rows, dtype: _by_scale(_gate(rows, dtype)),
    "quantize_fp8_per_token": _gate,
    "quantize_int8_per_token": _gate,
    "rms_norm": _norm,
    "rms_norm_backward": _norm_gradient,
    "scaled_mm_fp8": _product(torch.float8_e4m3fn),
    "scaled_mm_int8": _product(torch.int8),
    "sample_top_k_top_p": lambda rows, dtype: _probs(rows, dtype, "k", "p", "seed", "offset"),
    "top_k_renorm_probs": lambda rows, dtype: _probs(rows, dtype, "k"),
    "top_p_renorm_probs": lambda rows, dtype: _probs(rows, dtype, "p"),
    "rms_norm_quant_fp8": _norm,
    "silu_and_mul": _gate,
    "silu_and_mul_backward": _gate_gradient,
    "silu_and_mul_quant_fp8": _gate,
    "rms_norm_quant_fp8_per_group": lambda rows, dtype: _in_groups(rows, dtype, "x"),
    "rms_norm_quant_fp8_per_tensor": lambda rows, dtype: _by_scale(_norm(rows, dtype)),
    "fused_add_rms_norm_quant_fp8_per_group": lambda rows, dtype: _in_groups(
        rows, dtype, "x", "residual"
    ),
    "fused_add_rms_norm_quant_fp8_per_tensor": lambda rows, dtype: _by_scale(_fused(rows, dtype)),
    "silu_and_mul_quant_fp8_per_group": lambda rows, dtype: {
        "x": torch.randn(rows, 2, 256, dtype=dtype),
        "group_size": 8,
    },
    "silu_and_mul_quant_fp8_per_tensor": lambda rows, dtype: _by_scale(_gate(rows, dtype)),
    "topk_softmax": _routing,
    "varlen_attention": _varlen,
    "varlen_attention_with_lse": _varlen,
}
OPS = sorted(MAKERS)
_ALIKE = ("_per_group", "_per_tensor", "_backward")


def alike(op: str) -> list[pytest.MarkDecorator]:
    """Mark a variant of another op, to be tried where all is: how it is declared is the same."""
    return [pytest.mark.exhaustive] if op.endswith(_ALIKE) else []


SOME = [pytest.param(op, marks=alike(op)) for op in OPS]
"""All ops, variants of others only where all is tried."""
BACKENDS = ("torch", "inductor")
"""Those that a CPU has, `torch` for every op."""


def backends(op: str) -> list[str]:
    """Name those of an op."""
    registered = {spec.backend.value for spec in registry.get(op)}
    return [name for name in BACKENDS if name in registered]


FLOATING = [op for op in OPS if any(dtype.is_floating_point for dtype in catalogue()[op].dtypes)]
"""Ops of numbers that can have derivatives."""
CELLS = [(op, backend) for op in OPS for backend in backends(op)]


def opchecks(values: Arguments) -> tuple[str, ...]:
    """Name PyTorch's tests of an operator; its look at what was written can't read float8."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    narrow = any(isinstance(v, Tensor) and is_float8(v.dtype) for v in values.values())
    return tests if narrow else ("test_schema", *tests)


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a floating dtype has one byte."""
    return dtype.is_floating_point and dtype.itemsize == 1


def differentiable(op: str) -> list[str]:
    """Name the tensors of an op that can require grad; float8 can't be computed with."""
    args = arguments(op)
    return [
        name
        for name in catalogue()[op].tensor_arguments
        if args[name].is_floating_point() and not is_float8(args[name].dtype)
    ]


def arguments(op: str, rows: int = 3, dtype: torch.dtype = torch.float32) -> Arguments:
    """Make a legal call, by name and in order of the signature."""
    torch.manual_seed(len(op) + rows)
    made = MAKERS[op](rows, dtype)
    assert list(made) == list(catalogue()[op].signature.parameters)
    return made


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
    view = wide[..., 1::2]
    return view.copy_(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return _strided(tensor)
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
    view = wide[1:]
    return view.copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "strided": _strided,
    "transposed": _transposed,
    "offset": _offset,
}


def lay_out(values: Arguments, layout: str) -> Arguments:
    """Copy all tensors into another layout; the values stay."""
    change = LAYOUTS[layout]
    return {k: change(v) if isinstance(v, Tensor) else v for k, v in values.items()}


def outputs(op: str, values: Arguments, result: Any) -> list[Tensor]:
    """Give what a call made: its results, or the arguments that it wrote."""
    mutated = catalogue()[op].mutates
    if mutated:
        assert result is None
        return [values[name] for name in mutated]
    return [result] if isinstance(result, Tensor) else list(result)
