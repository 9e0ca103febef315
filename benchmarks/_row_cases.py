"""Calls of row ops on a GPU, candidates for how our Triton kernels run them, and other kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops.declarations import catalogue

Arguments = dict[str, Any]
Patch = dict[str, Any]
BACKEND = "torch_ops.backends.triton"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        op: The op.
        rows, columns: Tokens and width of a row; heads are fixed where there are any.
        dtype: Of the activations.
        options: Further arguments.
    """

    op: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.bfloat16 else f" {str(self.dtype).removeprefix('torch.')}"
        extra = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.op} {self.rows}x{self.columns}{kind}{extra}"


NORMS = (
    "rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_", "gemma_rms_norm", "layer_norm",
    "gemma_fused_add_rms_norm",
)  # fmt: skip
GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
ROPES = ("apply_rope", "apply_rope_")

CASES = (
    *(Case("rms_norm", rows, 4096) for rows in (1, 32, 128, 512, 1024, 2048, 4096)),
    Case("rms_norm", 16384, 8192),
    Case("rms_norm", 65536, 1024),
    Case("rms_norm", 8192, 5120),
    Case("rms_norm", 8192, 16384),
    Case("rms_norm", 524288, 128),
    Case("rms_norm", 1, 65536),
    Case("rms_norm", 16, 65536),
    Case("rms_norm", 128, 32768),
    Case("rms_norm", 2048, 65536),
    Case("rms_norm", 8192, 4096, torch.float32),
    *(Case("fused_add_rms_norm", rows, 4096) for rows in (1, 32, 512, 4096)),
    Case("fused_add_rms_norm", 16384, 8192),
    Case("fused_add_rms_norm", 65536, 1024),
    Case("fused_add_rms_norm_", 4096, 4096),
    Case("gemma_fused_add_rms_norm", 4096, 4096),
    Case("fused_add_rms_norm_", 16384, 8192),
    Case("layer_norm", 4096, 4096),
    Case("layer_norm", 16384, 8192),
    *(Case("silu_and_mul", rows, 14336) for rows in (1, 32, 512, 4096, 16384)),
    Case("gelu_and_mul", 4096, 14336),
    Case("gelu_tanh_and_mul", 4096, 14336),
    *(Case("apply_rope", rows, HEAD_DIM) for rows in (1, 32, 512, 4096, 16384)),
    Case("apply_rope", 16384, HEAD_DIM, options=(("is_neox", False),)),
    Case("apply_rope_", 1, HEAD_DIM),
    Case("apply_rope_", 16384, HEAD_DIM),
    *(Case("merge_state", rows, HEAD_DIM) for rows in (1, 128, 16384)),
)

# Inductor takes seconds for each of these, so it gets few.
COMPILED = tuple(
    case
    for case in CASES
    if case.dtype == torch.bfloat16
    and not case.op.endswith("_")
    and (case.op, case.rows, case.columns)
    in {
        ("rms_norm", 4096, 4096), ("rms_norm", 16384, 8192), ("rms_norm", 65536, 1024),
        ("fused_add_rms_norm", 4096, 4096), ("fused_add_rms_norm", 16384, 8192),
        ("layer_norm", 16384, 8192), ("silu_and_mul", 16384, 14336),
        ("apply_rope", 16384, 128), ("merge_state", 16384, 128),
    }
)  # fmt: skip


def arguments(case: Case, device: torch.device) -> Arguments:
    """Draw the tensors of a call anew."""
    if case.op in ROPES:
        return _rope_arguments(case, device)
    if case.op == "merge_state":
        shape = (case.rows, HEADS, case.columns)
        draw = functools.partial(torch.randn, device=device)
        parts = [(draw(shape, dtype=case.dtype), draw(shape[:2]) * 4) for _ in "ab"]
        return dict(zip(("v_a", "s_a", "v_b", "s_b"), (*parts[0], *parts[1]), strict=True))
    gated = case.op in GATES
    width = case.columns * (2 if gated else 1)
    x = torch.randn(case.rows, width, device=device, dtype=case.dtype)
    if gated:
        return {"x": x}
    weight = 1 + torch.randn(width, device=device, dtype=case.dtype) / 8
    found = {"x": x}
    if "fused_add" in case.op:
        found["residual"] = torch.randn_like(x)
    found["weight"] = weight
    if case.op == "layer_norm":
        found["bias"] = torch.randn_like(weight)
    return found


def _rope_arguments(case: Case, device: torch.device) -> Arguments:
    rows, size = case.rows, case.columns
    angle = torch.arange(131072, device=device)[:, None] * 10000 ** -(
        torch.arange(0, size, 2, device=device) / size
    )
    draw = functools.partial(torch.randn, device=device, dtype=case.dtype)
    return {
        "q": draw(rows, HEADS, size),
        "k": draw(rows, KV_HEADS, size),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], -1),
        "positions": torch.randint(0, 131072, (rows,), device=device),
        **dict(case.options),
    }


def traffic(case: Case) -> int:
    """Bytes that the call has to read and write, each once; vectors of one row left out."""
    item = case.dtype.itemsize
    if case.op in ROPES:
        heads = (HEADS + KV_HEADS) * case.columns * item
        return case.rows * (2 * heads + 4 * case.columns)
    if case.op == "merge_state":
        return case.rows * HEADS * (3 * case.columns * item + 12)
    tensors = 3 if case.op in GATES else 4 if "fused_add" in case.op else 2
    return case.rows * case.columns * item * tensors


def candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    """Give ways to run a call: a label, and what to set in the module that chooses."""
    if case.op in NORMS:
        yield from _norm_candidates(case)
    elif case.op in GATES:
        yield from _gate_candidates()
    elif case.op in ROPES:
        yield from _rope_candidates(case)
    else:
        yield from _merge_candidates(case)


def module_of(op: str) -> Any:
    """Import the module of the backend that chooses how an op runs."""
    name = "_norms" if op in NORMS else "_gates" if op in GATES else "_rotary"
    name = "_merges" if op == "merge_state" else name
    return importlib.import_module(f"{BACKEND}.{name}")


def kernel_of(op: str) -> Callable[..., Any]:
    """Import an op's kernel, without dispatcher and checks."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"{BACKEND}.{op}"), op)
    return found


def _always(config: Any) -> Callable[..., Any]:
    return lambda *_: config


def _norm_candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    module = module_of(case.op)
    size = (1 << (case.columns - 1).bit_length()) * case.dtype.itemsize
    if case.columns * case.dtype.itemsize > 32768:
        yield from _split_candidates(case)
    else:
        configs = _few_configs if case.rows <= 1024 else _crowd_configs
        for config in configs(size, module.Config):
            yield _norm_label(config), {"walk": _always(None), "config": _always(config)}
    if case.rows > 1024 or case.columns * case.dtype.itemsize > 32768:
        yield from _loop_candidates(case)


def _norm_label(config: Any) -> str:
    return f"rows {config.rows} threads {config.threads}{' late' if config.late else ''}"


def _few_configs(size: int, make: Any) -> Iterator[Any]:
    for each in (8, 16, 32, 64):
        if 32 <= size // each <= 1024:
            for late in (False, True):
                yield make(1, size // each, late)


def _crowd_configs(size: int, make: Any) -> Iterator[Any]:
    """Rows of a program, and bytes of them a thread."""
    for rows in (1, 2, 4, 8, 16, 32):
        for each in (16, 32, 64, 128):
            threads = rows * size // each
            if 1024 <= rows * size <= max(size, 8192) and 32 <= threads <= 1024:
                yield make(rows, threads, True)
                if each in (32, 64) and rows * size <= 16384:
                    yield make(rows, threads, False)


def _loop_candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    make = module_of(case.op).Walk
    item = case.dtype.itemsize
    for block in (1024, 2048, 4096, 8192, 16384):
        for each in (16, 32):
            threads = block * item // each
            if block <= case.columns <= 32 * block and 64 <= threads <= 1024:
                walk = make(block, threads)
                yield f"loop {block} threads {threads}", {"FEW": 0, "walk": _always(walk)}
                pieces = case.columns // block
                if case.op != "layer_norm" and case.columns == block * pieces and pieces <= 9:
                    walk = make(block, threads, pieces)
                    yield f"held {block} threads {threads}", {"FEW": 0, "walk": _always(walk)}


def _split_candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    for piece in (2048, 4096, 8192):
        if case.rows * case.columns // piece <= 4096:
            yield f"split {piece}", {"_LONGEST": 0, "FEW": 1 << 40, "_PIECE": piece}


def _gate_candidates() -> Iterator[tuple[str, Patch]]:
    make = module_of("silu_and_mul").Config
    for block in (512, 1024, 2048, 4096):
        for each in (8, 16):
            if block // each >= 64:
                config = make(block, 1, block // each)
                yield f"block {block} threads {block // each}", {"config": _always(config)}


def _rope_candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    make = module_of(case.op).Config
    for tokens in (1, 2, 4) if case.rows >= 4096 else (1,):
        for heads in (2, 4, 8, 16, 32):
            for each in (16, 32):
                threads = tokens * heads * case.columns * case.dtype.itemsize // 2 // each
                if 32 <= threads <= 256 and tokens * heads <= 32:
                    label = f"tokens {tokens} heads {heads} threads {threads}"
                    yield label, {"config": _always(make(tokens, heads, threads))}


def _merge_candidates(case: Case) -> Iterator[tuple[str, Patch]]:
    make = module_of(case.op).Config
    for rows in (2, 4, 8, 16, 32):
        for each in (16, 32):
            threads = rows * case.columns * case.dtype.itemsize // each
            if 32 <= threads <= 512:
                yield f"rows {rows} threads {threads}", {"config": _always(make(rows, threads))}


def peers(case: Case, args: Arguments) -> dict[str, Callable[[], Any]]:
    """Give other kernels for a call; to call one may raise where its package is absent."""
    reference = catalogue()[case.op].reference
    values = tuple(args.values())
    compiled = torch.compile(reference, dynamic=False, fullgraph=True)
    found: dict[str, Callable[[], Any]] = {"eager": _eager(case, args)}
    if case in COMPILED:
        found["inductor"] = lambda: compiled(*values)
    for package in ("flashinfer", "sgl_kernel"):
        lacks = package == "sgl_kernel" and case.op == "apply_rope_"
        if case.op in _FOREIGN and case.dtype.itemsize == 2 and not lacks:
            found[package] = _foreign(package, case, args)
    return found


def _eager(case: Case, args: Arguments) -> Callable[[], Any]:
    reference, values = catalogue()[case.op].reference, tuple(args.values())
    if case.op == "rms_norm":
        return lambda: functional.rms_norm(args["x"], (case.columns,), args["weight"], 1e-6)
    if case.op == "layer_norm":
        return lambda: functional.layer_norm(
            args["x"], (case.columns,), args["weight"], args["bias"], 1e-5
        )
    if case.op == "silu_and_mul":
        return lambda: functional.silu(args["x"][:, : case.columns]) * args["x"][:, case.columns :]
    return lambda: reference(*values)


_FOREIGN = {
    "rms_norm": "rmsnorm",
    "gemma_rms_norm": "gemma_rmsnorm",
    "fused_add_rms_norm_": "fused_add_rmsnorm",
    "silu_and_mul": "silu_and_mul",
    "gelu_and_mul": "gelu_and_mul",
    "gelu_tanh_and_mul": "gelu_tanh_and_mul",
    "apply_rope_": "apply_rope_with_cos_sin_cache_inplace",
    "merge_state": "merge_state",
}


def _foreign(package: str, case: Case, args: Arguments) -> Callable[[], Any]:
    """Call the op of another package by its own conventions."""
    name = _FOREIGN[case.op]
    if package == "sgl_kernel" and case.op == "merge_state":
        name = "merge_state_v2"

    @functools.cache
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(package), name)
        return found

    if case.op == "apply_rope_":
        q, k, cache, positions = (args[n] for n in ("q", "k", "cos_sin_cache", "positions"))
        flat: tuple[Tensor, Tensor] = (q.view(len(q), -1), k.view(len(k), -1))
        neox = args.get("is_neox", True)
        return lambda: function()(positions, *flat, q.shape[-1], cache, neox)
    values = tuple(args.values())
    return lambda: function()(*values)
