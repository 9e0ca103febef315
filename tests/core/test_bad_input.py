"""Illegal calls: one text for every backend, in kernel and fake, eager and compiled.

It names op, argument, what was received and what is accepted; no kernel has started and nothing
was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses import FakeTensorMode

import torch_ops
from torch_ops import TorchOpsError, calls, ops, policy, runtime
from torch_ops.declarations import catalogue

from . import samples
from .samples import BACKENDS, CELLS, OPS, Arguments, backends

Change = Callable[[Arguments], dict[str, Any]]
Case = tuple[str, str, Change, type[Exception], str]


def case(argument: str, what: str, change: Change, received: str, accepted: str = "") -> Any:
    """A change that makes a call illegal, and the words for it."""
    kind = TypeError if received.startswith("torch") else ValueError
    message = rf"argument '{argument}' is {received}.* \(accepted: .*{accepted}"
    return argument, what, change, kind, message


def cut(name: str, dim: int = -1) -> Change:
    """Make a dimension one shorter."""
    return lambda args: {name: args[name].narrow(dim, 0, args[name].shape[dim] - 1)}


def to(name: str, target: Any) -> Change:
    return lambda args: {name: args[name].to(target)}


def put(name: str, value: Any) -> Change:
    return lambda args: {name: value}


def rank(name: str, *shape: int) -> Change:
    return lambda args: {name: args[name].new_zeros(shape)}


def floats(name: str) -> list[Any]:
    """Not a floating dtype, and float8."""
    return [
        case(name, "int", to(name, torch.int32), r"torch\.int32", r"torch\.bfloat16"),
        case(name, "float8", to(name, torch.float8_e4m3fn), r"torch\.float8_e4m3fn"),
    ]


WIDTH = r"\[(16|128)\]"


def vector(name: str) -> list[Any]:
    return [
        case(
            name, "length", cut(name), r"of shape \[\d+\]", rf"{WIDTH}, the last dimension of 'x'"
        ),
        case(name, "rank", rank(name, 1, 16), r"of shape \[1, 16\]", WIDTH),
        case(name, "dtype", to(name, torch.int64), r"torch\.int64", r"torch\.float32"),
        case(name, "device", to(name, "meta"), "on device", "as 'x'"),
    ]


EPS = [
    case("eps", "negative", put("eps", -1e-6), "-1e-06", "a number >= 0"),
    case("eps", "nan", put("eps", float("nan")), "nan", "a number >= 0"),
]
X = [*floats("x"), case("x", "rank", rank("x"), r"of shape \[\]", "rank >= 1")]
NORM = [*X, *vector("weight"), *EPS]
FUSED = [
    *NORM,
    case("residual", "shape", cut("residual", 0), r"of shape \[2, 2, \d+\]", "the shape of 'x'"),
    case("residual", "dtype", to("residual", torch.float16), r"torch\.float16", "as 'x'"),
    case("residual", "device", to("residual", "meta"), "on device", "as 'x'"),
]
ODD = case("x", "odd", cut("x"), r"of shape \[3, 2, \d+\]", r"an even last dimension, not \d*5")
NORM_GRADIENT = [
    *NORM,
    case("grad", "shape", cut("grad", 0), r"of shape \[2, 2, 16\]", "the shape of 'x'"),
    case("grad", "dtype", to("grad", torch.float16), r"torch\.float16", "as 'x'"),
    case("grad", "device", to("grad", "meta"), "on device", "as 'x'"),
]
GATE = [*X, ODD]
GATE_GRADIENT = [
    *X,
    case("grad", "shape", cut("grad", 0), r"of shape \[2, 2, 8\]", "that of the result"),
    case("grad", "width", cut("grad"), r"of shape \[3, 2, 7\]", r"\[3, 2, 8\]"),
    case("grad", "dtype", to("grad", torch.float16), r"torch\.float16", "as 'x'"),
    case("grad", "device", to("grad", "meta"), "on device", "as 'x'"),
]
SCALE = [
    case("scale", "dtype", to("scale", torch.float16), r"torch\.float16", r"torch\.float32"),
    case("scale", "size", rank("scale", 2), r"of shape \[2\]", r"\[1\] or \[\]"),
    case("scale", "rank", rank("scale", 1, 1), r"of shape \[1, 1\]", r"\[1\] or \[\]"),
    case("scale", "device", to("scale", "meta"), "on device", "as 'x'"),
]
GROUP = [
    case("group_size", "none", put("group_size", 0), "0", "a divisor of 128"),
    case("group_size", "no divisor", put("group_size", 5), "5", "a divisor of 128"),
]
ROPE = [
    *floats("q"),
    case("q", "rank", rank("q", 3, 16), r"of shape \[3, 16\]", r"rank 3, \[T, H, D\]"),
    case("k", "tokens", cut("k", 0), r"of shape \[2, 2, 16\]", r"\[3, K, 16\]"),
    case("k", "head_dim", cut("k"), r"of shape \[3, 2, 15\]", r"\[3, K, 16\]"),
    case("k", "rank", rank("k", 3, 16), r"of shape \[3, 16\]", "T and D of 'q'"),
    case("k", "dtype", to("k", torch.float16), r"torch\.float16", "as 'q'"),
    case("k", "device", to("k", "meta"), "on device", "as 'q'"),
    case(
        "cos_sin_cache", "dtype", to("cos_sin_cache", torch.float64), r"torch\.float64", "float32"
    ),
    case("cos_sin_cache", "rank", rank("cos_sin_cache", 8), r"of shape \[8\]", "rank 2"),
    case("cos_sin_cache", "odd", cut("cos_sin_cache"), r"of shape \[32, 7\]", "an even rotary_dim"),
    case("cos_sin_cache", "wide", rank("cos_sin_cache", 32, 18), r"of shape \[32, 18\]", "most 16"),
    case("cos_sin_cache", "device", to("cos_sin_cache", "meta"), "on device", "as 'q'"),
    case("positions", "dtype", to("positions", torch.float32), r"torch\.float32", "int32, torch.i"),
    case("positions", "shape", cut("positions"), r"of shape \[2\]", r"\[3\]"),
    case("positions", "device", to("positions", "meta"), "on device", "as 'q'"),
]
ATTENTION = [
    *floats("q"),
    case("q", "rank", rank("q", 3, 4, 16), r"of shape \[3, 4, 16\]", r"rank 4, \[B, S_q, H, D\]"),
    case("k", "batch", cut("k", 0), r"of shape \[2, 5, 2, 16\]", r"\[3, S_kv, K, 16\]"),
    case("k", "head_dim", cut("k"), r"of shape \[3, 5, 2, 15\]", r"\[3, S_kv, K, 16\]"),
    case("k", "rank", rank("k", 5, 2, 16), r"of shape \[5, 2, 16\]", "B and D of 'q'"),
    case("k", "dtype", to("k", torch.float16), r"torch\.float16", "as 'q'"),
    case("v", "dtype", to("v", torch.float16), r"torch\.float16", "as 'q'"),
    case("v", "length", cut("v", 1), r"of shape \[3, 4, 2, 16\]", r"\[3, 5, 2, 'D'\]"),
    case("v", "device", to("v", "meta"), "on device", "as 'q'"),
    case(
        "k",
        "heads",
        lambda args: {n: args[n].new_zeros(3, 5, 3, 16) for n in ("k", "v")},
        "of 3 heads",
        "a divisor of the 4 heads of 'q'",
    ),
    case("scale", "infinite", put("scale", float("inf")), "inf", "a finite number or None"),
    case("scale", "nan", put("scale", float("nan")), "nan", "a finite number or None"),
    case("window_left", "low", put("window_left", -2), "-2", "-1 for none, or a number >= 0"),
    case("logits_soft_cap", "negative", put("logits_soft_cap", -1.0), r"-1\.0", "a number >= 0"),
    case("logits_soft_cap", "nan", put("logits_soft_cap", float("nan")), "nan", "a number >= 0"),
]
NUMBERS = ATTENTION[-5:]
LEFT = [
    *ATTENTION,
    *(
        case(name, "shape", cut(name, 1), r"of shape \[3, 2, 4", "that of the result")
        for name in ("out", "grad")
    ),
    *(
        case(name, "dtype", to(name, torch.float16), "torch.float16", "as 'q'")
        for name in ("out", "grad")
    ),
    *(
        case(
            name, "width", rank(name, 3, 3), r"of shape \[3, 3\]", r"that of an LSE, \[B, S_q, H\]"
        )
        for name in ("lse", "grad_lse")
    ),
    *(
        case(name, "dtype", to(name, torch.float64), r"torch\.float64", r"torch\.float32")
        for name in ("lse", "grad_lse")
    ),
    case("lse", "device", to("lse", "meta"), "on device", "as 'q'"),
    case("grad", "device", to("grad", "meta"), "on device", "as 'q'"),
]


def index(name: str, queries: str = "q") -> list[Any]:
    """Not int32, not a vector, not on the device of the queries."""
    return [
        case(name, "dtype", to(name, torch.int64), r"torch\.int64", r"torch\.int32"),
        case(name, "rank", lambda args: {name: args[name][None]}, "of shape", "rank 1, a vector"),
        case(name, "device", to(name, "meta"), "on device", f"as '{queries}'"),
    ]


QUERIES = [
    *floats("q"),
    case("q", "rank", rank("q", 3, 16), r"of shape \[3, 16\]", r"rank 3, \["),
]
VARLEN = [
    *QUERIES,
    case("k", "rank", rank("k", 3, 16), r"of shape \[3, 16\]", r"\[N, K, 16\], D of 'q'"),
    case("k", "head_dim", cut("k"), r"of shape \[6, 2, 15\]", r"\[N, K, 16\], D of 'q'"),
    case("k", "dtype", to("k", torch.float16), r"torch\.float16", "as 'q'"),
    case("v", "rows", cut("v", 0), r"of shape \[5, 2, 16\]", r"\[6, 2, 'D'\], N and K of 'k'"),
    case("v", "dtype", to("v", torch.float16), r"torch\.float16", "as 'q'"),
    case("v", "device", to("v", "meta"), "on device", "as 'q'"),
    case(
        "k",
        "heads",
        lambda args: {n: args[n].new_zeros(6, 3, 16) for n in ("k", "v")},
        "of 3 heads",
        "a divisor of the 4 heads of 'q'",
    ),
    *index("qo_indptr"),
    case("qo_indptr", "empty", lambda a: {"qo_indptr": a["qo_indptr"][:0]}, r"of shape \[0\]", "B"),
    *index("kv_indptr"),
    case("kv_indptr", "short", cut("kv_indptr"), r"of shape \[3\]", r"\[4\], \[B \+ 1\] of 'qo_in"),
    case("max_qo_len", "negative", put("max_qo_len", -1), "-1", "a number >= 0"),
    case("max_kv_len", "negative", put("max_kv_len", -2), "-2", "a number >= 0"),
    *NUMBERS,
]
PAGES = [
    case("k_cache", "rank", rank("k_cache", 4, 2, 16), r"of shape \[4, 2, 16\]", "page_size >= 1"),
    case("k_cache", "head_dim", cut("k_cache"), r"of shape \[40, 4, 2, 15\]", "K, 16"),
    case("k_cache", "no slots", rank("k_cache", 40, 0, 2, 16), "of shape", "page_size >= 1"),
    case("v_cache", "pages", cut("v_cache", 0), r"of shape \[39, 4, 2, 16\]", r"\[40, 4, 2, 'D'\]"),
]
TABLES = [
    case("kv_indptr", "short", cut("kv_indptr"), r"of shape \[3\]", r"\[4\], a bound more than"),
    case(
        "kv_last_page_len", "short", cut("kv_last_page_len"), r"of shape \[2\]", r"\[3\], one a se"
    ),
]
LATENTS = [
    *floats("q_nope"),
    case("q_nope", "rank", rank("q_nope", 3, 16), r"of shape \[3, 16\]", r"rank 3, \[B, H, L\]"),
    case("q_pe", "heads", cut("q_pe", 1), r"of shape \[3, 3, 6\]", r"\[3, 4, R\], B and H"),
    case("q_pe", "dtype", to("q_pe", torch.float16), r"torch\.float16", "as 'q_nope'"),
    case("ckv_cache", "rank", rank("ckv_cache", 4, 16), r"of shape \[4, 16\]", "page_size >= 1"),
    case("ckv_cache", "latents", cut("ckv_cache"), r"of shape \[40, 4, 15\]", "16.*L of 'q_nope'"),
    case("ckv_cache", "no slots", rank("ckv_cache", 40, 0, 16), "of shape", "page_size >= 1"),
    case("ckv_cache", "dtype", to("ckv_cache", torch.float16), r"torch\.float16", "as 'q_nope'"),
    case("kpe_cache", "pages", cut("kpe_cache", 0), r"of shape \[39, 4, 6\]", r"\[40, 4, 6\], P"),
    case("kpe_cache", "rotated", cut("kpe_cache"), r"of shape \[40, 4, 5\]", "R of 'q_pe'"),
    case("kpe_cache", "device", to("kpe_cache", "meta"), "on device", "as 'q_nope'"),
    *index("kv_indptr", "q_nope"),
    *index("kv_indices", "q_nope"),
    *index("kv_last_page_len", "q_nope"),
    *TABLES,
    case("scale", "infinite", put("scale", float("inf")), "inf", "a finite number"),
    case("scale", "nan", put("scale", float("nan")), "nan", "a finite number"),
]
PAGED = [
    *QUERIES,
    *PAGES,
    case("k_cache", "dtype", to("k_cache", torch.float16), r"torch\.float16", "as 'q'"),
    case("v_cache", "dtype", to("v_cache", torch.float16), r"torch\.float16", "as 'q'"),
    case("v_cache", "device", to("v_cache", "meta"), "on device", "as 'q'"),
    case(
        "k_cache",
        "heads",
        lambda args: {n: args[n].new_zeros(40, 4, 3, 16) for n in ("k_cache", "v_cache")},
        "of 3 heads",
        "a divisor of the 4 heads of 'q'",
    ),
    *index("kv_indptr"),
    *index("kv_indices"),
    *index("kv_last_page_len"),
    *TABLES,
    *NUMBERS,
]
PREFILL = [
    *PAGED,
    *index("qo_indptr"),
    case("qo_indptr", "empty", lambda a: {"qo_indptr": a["qo_indptr"][:0]}, r"of shape \[0\]", "B"),
]
SLOTS = [
    case("v", "tokens", cut("v", 0), r"of shape \[2, 2, 16\]", r"\[3, 2, Dv\], as 'k'"),
    case("v", "dtype", to("v", torch.float16), r"torch\.float16", "as 'k'"),
    *PAGES,
    case(
        "k_cache",
        "heads",
        lambda args: {n: args[n][:, :, :1] for n in ("k_cache", "v_cache")},
        r"of shape \[40, 4, 1, 16\]",
        "the heads of 'k'",
    ),
    case("v_cache", "head_dim", cut("v_cache"), r"of shape \[40, 4, 2, 15\]", "the heads of 'v'"),
    case("k_cache", "dtype", to("k_cache", torch.float16), r"torch\.float16", "as 'k'"),
    case("v_cache", "device", to("v_cache", "meta"), "on device", "as 'k'"),
    case("slot_mapping", "dtype", to("slot_mapping", torch.int32), r"torch\.int32", "torch.int64"),
    case("slot_mapping", "short", cut("slot_mapping"), r"of shape \[2\]", r"\[3\], \[T\] of 'k'"),
    case("slot_mapping", "device", to("slot_mapping", "meta"), "on device", "as 'k'"),
    case(
        "k_cache", "is values", lambda a: {"v_cache": a["k_cache"]}, "at offset 0", "clone one of"
    ),
    case(
        "k_cache", "holds rows", lambda a: {"k": a["k_cache"][0][:3]}, "at offset 0", "clone one of"
    ),
    case(
        "v_cache",
        "expanded",
        lambda args: {"v_cache": torch.zeros(1, 4, 2, 16).expand(40, 4, 2, 16)},
        r"of strides \[0, 32, 16, 1\]",
        "clone it first",
    ),
]
APPEND = [
    *floats("k"),
    case("k", "rank", rank("k", 3, 16), r"of shape \[3, 16\]", r"rank 3, \[T, K, D\]"),
    *SLOTS,
]
MERGE = [
    *floats("v_a"),
    case("v_a", "rank", rank("v_a", 3, 16), r"of shape \[3, 16\]", r"rank 3, \[T, H, D\]"),
    case("v_b", "shape", cut("v_b", 0), r"of shape \[2, 2, 16\]", "the shape of 'v_a'"),
    case("v_b", "dtype", to("v_b", torch.float16), r"torch\.float16", "as 'v_a'"),
    case("v_b", "device", to("v_b", "meta"), "on device", "as 'v_a'"),
    case("s_a", "shape", cut("s_a"), r"of shape \[3, 1\]", r"\[3, 2\], \[T, H\] of 'v_a'"),
    case("s_b", "dtype", to("s_b", torch.float16), r"torch\.float16", r"torch\.float32"),
    case("s_b", "device", to("s_b", "meta"), "on device", "as 'v_a'"),
]
ROUTING = [
    *floats("logits"),
    case("logits", "rank", rank("logits", 16), r"of shape \[16\]", r"\[T, E\], E at least 1"),
    case("logits", "no experts", rank("logits", 3, 0), r"of shape \[3, 0\]", "E at least 1"),
    case("k", "zero", put("k", 0), "0", "1 to 16, the experts of 'logits'"),
    case("k", "more than experts", put("k", 17), "17", "1 to 16, the experts of 'logits'"),
]
EXPERTS = [
    *floats("x"),
    case("x", "rank", rank("x", 3, 1, 16), r"of shape \[3, 1, 16\]", r"rank 2, \[T, H\]"),
    case("w_down", "hidden", cut("w_down", 1), r"of shape \[4, 15, 6\]", r"\[E, 16, F\]"),
    case("w_down", "dtype", to("w_down", torch.float16), r"torch\.float16", "as 'x'"),
    case("w_gate_up", "experts", cut("w_gate_up", 0), r"of shape \[3, 12, 16\]", r"\[4, 12, 16\]"),
    case("w_gate_up", "device", to("w_gate_up", "meta"), "on device", "as 'x'"),
    case("ids", "tokens", cut("ids", 0), r"of shape \[2, 2\]", r"\[3, k\], T of 'x'"),
    case("ids", "dtype", to("ids", torch.int64), r"torch\.int64", r"torch\.int32"),
    case("ids", "device", to("ids", "meta"), "on device", "as 'x'"),
    case("weights", "shape", cut("weights"), r"of shape \[3, 1\]", r"\[3, 2\], \[T, k\] of 'ids'"),
    case("weights", "dtype", to("weights", torch.float16), r"torch\.float16", r"torch\.float32"),
]
ALIGN = [
    case("ids", "dtype", to("ids", torch.int64), r"torch\.int64", r"torch\.int32"),
    case("ids", "float", to("ids", torch.float32), r"torch\.float32", r"torch\.int32"),
    case("ids", "rank", rank("ids", 6), r"of shape \[6\]", r"rank 2, \[T, k\]"),
    case("num_experts", "zero", put("num_experts", 0), "0", "1 to 1073741824"),
    case("block_size", "negative", put("block_size", -1), "-1", "1 to 1073741824"),
    case("block_size", "too many entries", put("block_size", 2**30), "1073741824, for which"),
]
SHARED = [
    case("x", "is residual", lambda args: {"residual": args["x"]}, "at offset 0", "clone one of"),
    case(
        "x",
        "overlaps",
        lambda args: {
            "x": (both := torch.zeros(4, 2, 16))[:3],
            "residual": both[1:],
        },
        r"at offset 0 of the storage of 'residual' \(offset 32\)",
        "memory apart from 'residual'",
    ),
    case(
        "weight",
        "is a row of x",
        lambda args: {"weight": args["x"][1, 1]},
        r"at offset 48 of the storage of 'x' \(offset 0\)",
        "clone one of them",
    ),
    case(
        "weight",
        "of another dtype in x",
        lambda args: {
            "x": (store := torch.zeros(128)).view(torch.bfloat16)[20:116].view(3, 2, 16),
            "residual": torch.zeros(3, 2, 16, dtype=torch.bfloat16),
            "weight": store[:16],
        },
        "at offset 0 of the storage of 'x'",
        "clone one of them",
    ),
    case(
        "x",
        "expanded",
        lambda args: {"x": torch.zeros(1, 2, 16).expand(3, 2, 16)},
        r"of strides \[0, 16, 1\]",
        "elements don't share memory; clone it first",
    ),
]
SHARED_ROPE = [
    case("q", "overlaps", lambda args: {"k": args["q"][:, :2]}, "at offset 0", "clone one of them"),
    case(
        "q",
        "in the cache",
        lambda args: {
            "q": args["cos_sin_cache"][:24].view(3, 4, 16)[:, :, :],
            "k": args["k"],
        },
        "at offset 0 of the storage of 'cos_sin_cache'",
        "clone one of them",
    ),
    case(
        "k",
        "expanded",
        lambda args: {"k": torch.zeros(3, 1, 16).expand(3, 2, 16)},
        "of strides",
        "clone it first",
    ),
]
TURNED_SLOTS = [
    *ROPE,
    *SHARED_ROPE[:2],
    *SLOTS,
    case("q", "expanded", lambda args: {"q": torch.zeros(3, 1, 16).expand(3, 4, 16)}, "of strides"),
    case("q", "of v", lambda args: {"v": args["q"][:, :2]}, "at offset 0 of the storage of 'v'"),
    case("q", "of pages", lambda args: {"q": args["v_cache"][0][:3].expand(3, 2, 16)},
         "at offset 0 of the storage of 'v_cache'"),
    case("k_cache", "of angles", lambda args: {"cos_sin_cache": args["k_cache"][0, 0]},
         "at offset 0 of the storage of 'cos_sin_cache'"),
]  # fmt: skip
PRODUCT = [
    case("a", "dtype", to("a", torch.float16), r"torch\.float16", "torch"),
    case("a", "rank", rank("a", 3, 4, 8), r"of shape \[3, 4, 8\]", r"rank 2, \[M, K\]"),
    case("b", "rank", rank("b", 3), r"of shape \[3\]", r"rank 2, \[K, N\]"),
    case("b", "dtype", to("b", torch.float8_e5m2), r"torch\.float8_e5m2", "as 'a'"),
    case("b", "device", to("b", "meta"), "on device", "as 'a'"),
    case("b", "K", cut("b", 0), r"of shape \[31, 16\]", r"\[32, 16\], \[K, N\] for 'a'"),
    case("scale_a", "dtype", to("scale_a", torch.float64), r"torch\.float64", r"torch\.float32"),
    case("scale_a", "rows", cut("scale_a", 0), r"of shape \[2, 1\]", r"\[3, 1\] or, for groups"),
    case("scale_a", "device", to("scale_a", "meta"), "on device", "as 'a'"),
    case("scale_b", "columns", cut("scale_b", 1), r"of shape \[1, 15\]", r"\[1, 16\] or"),
    case("scale_b", "rank", rank("scale_b", 16), r"of shape \[16\]", r"\[1, 16\] or, for groups"),
    case("out_dtype", "kind", put("out_dtype", torch.int8), r"torch\.int8", r"torch\.float16"),
    case("bias", "length", cut("bias"), r"of shape \[15\]", r"\[16\], \[N\] of 'b'"),
    case("bias", "dtype", to("bias", torch.int32), r"torch\.int32", r"torch\.bfloat16"),
    case("bias", "device", to("bias", "meta"), "on device", "as 'a'"),
]


def numbers(name: str, dtype: str) -> list[Any]:
    """What a number of each row can't be."""
    return [
        case(name, "dtype", to(name, torch.float16), r"torch\.float16", rf"torch\.{dtype}"),
        case(name, "shape", cut(name, 0), r"of shape \[2\]", r"\[3\], \[B\] of 'probs'"),
        case(name, "device", to(name, "meta"), "on device", "as 'probs'"),
    ]


PROBS = [
    case("probs", "dtype", to("probs", torch.float16), r"torch\.float16", r"torch\.float32"),
    case("probs", "rank", rank("probs", 3), r"of shape \[3\]", r"rank 2, \[B, V\]"),
]
DRAWN = [
    *PROBS,
    case("probs", "columns", lambda args: {"probs": torch.zeros(3, 0)}, r"of shape \[3, 0\]",
         r"\[B, V\], V at least 1"),
    *numbers("k", "int32"), *numbers("p", "float32"),
    *numbers("seed", "int64"), *numbers("offset", "int64"),
]  # fmt: skip
BAD: dict[str, list[Any]] = {
    "append_paged_kv_": APPEND,
    "apply_rope": ROPE,
    "apply_rope_": [*ROPE, *SHARED_ROPE],
    "apply_rope_append_paged_kv_": TURNED_SLOTS,
    "attention": ATTENTION,
    "attention_backward": LEFT,
    "attention_with_lse": ATTENTION,
    "fused_add_rms_norm": FUSED,
    "gemma_fused_add_rms_norm": FUSED,
    "fused_add_rms_norm_": [*FUSED, *SHARED],
    "fused_add_rms_norm_quant_fp8": FUSED,
    "fused_add_rms_norm_quant_fp8_per_group": [*FUSED, *GROUP],
    "fused_add_rms_norm_quant_fp8_per_tensor": [*FUSED, *SCALE],
    "fused_experts": EXPERTS,
    "gelu_and_mul": GATE,
    "gelu_and_mul_backward": GATE_GRADIENT,
    "gelu_tanh_and_mul": GATE,
    "gelu_tanh_and_mul_backward": GATE_GRADIENT,
    "gemma_rms_norm": NORM,
    "layer_norm": [*NORM, *vector("bias")],
    "layer_norm_backward": [*NORM_GRADIENT, *vector("bias")],
    "merge_state": MERGE,
    "min_p_filter": [*PROBS, *numbers("min_p", "float32")],
    "mla_decode": LATENTS,
    "moe_align_block_size": ALIGN,
    "paged_decode": PAGED,
    "paged_prefill": PREFILL,
    "quantize_fp8_per_group": [*X, *GROUP],
    "quantize_fp8_per_tensor": [*X, *SCALE],
    "quantize_fp8_per_token": X,
    "quantize_int8_per_token": X,
    "rms_norm": NORM,
    "rms_norm_backward": [
        *NORM_GRADIENT,
        case("residual_grad", "shape", cut("residual_grad"), r"of shape \[3, 2, 15\]", "of 'x'"),
        case("residual_grad", "dtype", to("residual_grad", torch.float16), r"torch\.float16"),
    ],
    "scaled_mm_fp8": PRODUCT,
    "scaled_mm_int8": [
        *PRODUCT,
        case(
            "a",
            "long",
            lambda args: {
                "a": torch.zeros(3, 131072, dtype=torch.int8),
                "b": torch.zeros(131072, 16, dtype=torch.int8),
            },
            r"of shape \[3, 131072\]",
            "K up to 131071",
        ),
    ],
    "sample_top_k_top_p": DRAWN,
    "top_k_renorm_probs": [*PROBS, *numbers("k", "int32")],
    "top_p_renorm_probs": [*PROBS, *numbers("p", "float32")],
    "rms_norm_quant_fp8": NORM,
    "rms_norm_quant_fp8_per_group": [*NORM, *GROUP],
    "rms_norm_quant_fp8_per_tensor": [*NORM, *SCALE],
    "silu_and_mul": GATE,
    "silu_and_mul_backward": GATE_GRADIENT,
    "silu_and_mul_quant_fp8": GATE,
    "silu_and_mul_quant_fp8_per_group": [*GATE, *GROUP],
    "silu_and_mul_quant_fp8_per_tensor": [*GATE, *SCALE],
    "topk_softmax": ROUTING,
    "varlen_attention": VARLEN,
    "varlen_attention_with_lse": VARLEN,
}
CASES = [
    pytest.param(op, *found[2:], id=f"{op}-{found[0]}-{found[1].replace(' ', '_')}")
    for op in OPS
    for found in BAD[op]
]


FIRST_OF_EACH = list(
    {(p.values[0], str(p.values[3]).split(" is ")[0], p.values[2]): p for p in CASES[::-1]}.values()
)
"""One case for each op, argument and class: what Dynamo makes of it depends on no more."""


def test_every_op_is_covered() -> None:
    assert set(BAD) == set(samples.MAKERS) == set(catalogue())


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a kernel would be chosen: it has to be too late by then."""

    def start(*args: object) -> Callable[..., Any]:
        raise AssertionError("a kernel was about to start")

    policy.invalidate()
    monkeypatch.setattr(calls, "_resolve", start)
    yield
    policy.invalidate()


def bad(op: str, change: Change) -> Arguments:
    args = samples.arguments(op)
    return args | change(args)


def copies(args: Arguments) -> list[tuple[Tensor, Tensor, int]]:
    return [(t, t.clone(), t._version) for t in args.values() if isinstance(t, Tensor)]


def untouched(before: list[tuple[Tensor, Tensor, int]]) -> bool:
    return all(
        t._version == version and (t.is_meta or bits(t).equal(bits(copy)))
        for t, copy, version in before
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.mark.parametrize(("op", "change", "kind", "message"), CASES)
@pytest.mark.usefixtures("nothing_starts")
def test_eager(op: str, change: Change, kind: type[Exception], message: str) -> None:
    """Through the operator, its ``.backend`` overload for every backend, and the callable."""
    args = bad(op, change)
    before = copies(args)
    packet = getattr(torch.ops.torch_ops, op)
    calls: list[Callable[[], Any]] = [
        lambda: packet(*args.values()),
        lambda: packet.default(**args),
        lambda: getattr(ops, op)(**args),
        *(lambda b=b: packet.backend(*args.values(), b) for b in backends(op)),
        *(lambda b=b: getattr(ops, op)(**args, backend=b) for b in backends(op)),
    ]
    texts = set()
    for call in calls:
        with pytest.raises(kind, match=rf"op '{op}': {message}") as raised:
            call()
        texts.add(str(raised.value))
        with torch.inference_mode(), pytest.raises(kind, match=message):
            call()
    assert len({re.sub("device (cpu|meta)", "device", text) for text in texts}) == 1
    assert untouched(before)


@pytest.mark.parametrize(("op", "change", "kind", "message"), CASES)
def test_fake(op: str, change: Change, kind: type[Exception], message: str) -> None:
    """The fake of every backend gives the same class and text."""
    args = bad(op, change)
    packet = getattr(torch.ops.torch_ops, op)
    mode = FakeTensorMode()
    fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in args.items()}
    with mode:
        with pytest.raises(kind, match=rf"op '{op}': {message}"):
            packet(*fakes.values())
        for backend in backends(op):
            with pytest.raises(kind, match=rf"op '{op}': {message}"):
                packet.backend(*fakes.values(), backend)


@pytest.mark.parametrize(("op", "change", "kind", "message"), FIRST_OF_EACH)
@pytest.mark.usefixtures("nothing_starts")
def test_compiled(op: str, change: Change, kind: type[Exception], message: str) -> None:
    """Dynamo wraps what a fake raises; the text is ours, whether graphs may break or not."""
    args = bad(op, change)
    before = copies(args)
    packet: Any = getattr(torch.ops.torch_ops, op)
    torch._dynamo.reset()
    compiled: Any = torch.compile(packet, backend="eager", fullgraph=True)
    with pytest.raises(TorchRuntimeError, match=rf"op '{op}': {message}"):
        compiled(*args.values())
    assert untouched(before)


@pytest.mark.parametrize(("op", "backend"), CELLS)
@pytest.mark.usefixtures("nothing_starts")
def test_compiled_with_a_chosen_backend(op: str, backend: str) -> None:
    """The first case of each op, a wrong dtype, through the other overload."""
    _, _, change, _, message = BAD[op][0]
    args = bad(op, change)
    call = getattr(ops, op)
    torch._dynamo.reset()
    for fullgraph in (True, False):
        compiled = torch.compile(
            lambda *a: call(*a, backend=backend), backend="eager", fullgraph=fullgraph
        )
        with pytest.raises(TorchRuntimeError, match=rf"op '{op}': {message}"):
            compiled(*args.values())


TENSORS = [
    (op, name)
    for op in OPS
    for name in catalogue()[op].tensor_arguments
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), TENSORS)
@pytest.mark.usefixtures("nothing_starts")
def test_not_a_tensor(op: str, name: str) -> None:
    """A TypeError of ours through the callable; the dispatcher answers first elsewhere."""
    args = samples.arguments(op)
    optional = catalogue()[op].signature.parameters[name].annotation is not Tensor
    accepted = "a Tensor or None" if optional else "a Tensor"
    for value in ([1.0], 1.0, "x", torch.nn.Linear(1, 1)):
        text = f"op '{op}': argument '{name}' must be {accepted}, received {type(value).__name__}"
        for backend in (None, *backends(op)):
            with pytest.raises(TypeError, match=f"^{text}$"):
                getattr(ops, op)(**args | {name: value}, backend=backend)
        with pytest.raises(RuntimeError, match=f"argument '{name}'"):
            getattr(torch.ops.torch_ops, op)(*(args | {name: value}).values())
    if not optional:
        with pytest.raises(TypeError, match=f"op '{op}': argument '{name}' .*received NoneType"):
            getattr(ops, op)(**args | {name: None})


@pytest.mark.parametrize("op", OPS)
def test_not_a_tensor_compiled(op: str) -> None:
    args = samples.arguments(op)
    name = catalogue()[op].tensor_arguments[0]
    call: Any = getattr(ops, op)
    torch._dynamo.reset()
    compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"op '{op}': argument '{name}' must be a Tensor, received"):
        compiled(**args | {name: [1.0]})


@pytest.mark.parametrize("op", OPS)
def test_wrong_number_of_arguments(op: str) -> None:
    args = samples.arguments(op)
    call = getattr(ops, op)
    with pytest.raises(TypeError, match=rf"{op}\(\) missing \d+ required positional argument"):
        call()
    with pytest.raises(TypeError, match=rf"{op}\(\) takes .* positional argument"):
        call(*args.values(), "torch")
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument 'epsilon'"):
        call(**args, epsilon=1e-5)


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_arguments_that_share_a_storage_but_no_element(backend: str) -> None:
    """Columns and rows of one matrix are apart: the packed layouts of real models."""
    packed = torch.randn(3, 4 + 2, 16)
    q, k = packed[:, :4], packed[:, 4:]
    cache, positions = torch.randn(8, 16), torch.arange(3)
    expected = ops.apply_rope(q, k, cache, positions)
    ops.apply_rope_(q, k, cache, positions, backend=backend)
    torch.testing.assert_close((q, k), expected)
    rows = torch.randn(4, 16)
    x, residual = rows[:2], rows[2:]
    wanted = ops.fused_add_rms_norm(x, residual, torch.ones(16))
    ops.fused_add_rms_norm_(x, residual, torch.ones(16), backend=backend)
    torch.testing.assert_close((x, residual), wanted)


def test_every_good_sample_is_accepted() -> None:
    """So that what the cases change is what is refused."""
    with torch_ops.debug():
        for op in OPS:
            getattr(ops, op)(**samples.arguments(op), backend="torch")


UNUSUAL: dict[str, tuple[Callable[[], Tensor], str]] = {
    "coo": (lambda: torch.ones(2, 4).to_sparse(), r"of layout torch.sparse_coo .*x\.to_dense\(\)"),
    "csr": (lambda: torch.ones(2, 4).to_sparse_csr(), r"of layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.ones(2, 4).to_mkldnn(), r"of layout torch._mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8),
        r"quantized \(torch.qint8\) .*x\.dequantize\(\)",
    ),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|quantiz).*:UserWarning")
@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_no_plain_memory(kind: str, backend: str | None) -> None:
    make, received = UNUSUAL[kind]
    message = f"op 'silu_and_mul': argument 'x' is {received}"
    with pytest.raises(TorchOpsError, match=message):
        ops.silu_and_mul(make(), backend=backend)
    with pytest.raises(TorchOpsError, match=message.replace("silu_and_mul", "rms_norm")):
        ops.rms_norm(make(), torch.ones(4), backend=backend)


def test_a_device_without_kernels_is_named() -> None:
    refuse = runtime._refuse_device(catalogue()["silu_and_mul"])
    with pytest.raises(TorchOpsError, match="op 'silu_and_mul': no kernels for device meta"):
        refuse(torch.ones(2, 4, device="meta"))
