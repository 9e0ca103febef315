"""Compiled graphs: a chain of 32 norms and a block of Llama, by whom their small ops are written.

Contenders: ``native`` (plain PyTorch by hand), ``custom_op`` and ``define_impl`` (operators around
the kernel that we choose), ``opaque`` (ours, one call each) and ``inlined`` (ours, dissolved). All
are compiled whole, in default mode and, on a GPU, in reduce-overhead; they take turns, forth and
back, and the least time of the rounds counts, on a GPU until it is idle again.
"""

from __future__ import annotations

import argparse
import functools
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.library import custom_op

import torch_ops
from benchmarks import _plain
from benchmarks._measure import device_here, machine
from torch_ops.declarations import catalogue

LENGTH, ROUNDS, CALLS = 32, 20, 5
WARM_UPS = (3, 20, 0.01)
"""Calls before those that count, at least and at most, and seconds for those beyond the least:
guards look at a new policy, CUDA graphs are recorded, and the processor has the code of a short
frame in its caches again."""
LIMITS = {("inlined", "native"): 1.02, ("opaque", "define_impl"): 1.05}
"""At most this ratio of the one's time to the other's."""
_EPS = 1e-5
_OPS = ("rms_norm", "fused_add_rms_norm", "apply_rope", "silu_and_mul")


class Ops(NamedTuple):
    """The small ops of a model by one author."""

    rms_norm: Callable[..., Any]
    fused_add_rms_norm: Callable[..., Any]
    apply_rope: Callable[..., Any]
    silu_and_mul: Callable[..., Any]


class Size(NamedTuple):
    """Sizes of a block: tokens, heads, heads of keys, their size, and that of the gate."""

    tokens: int = 512
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    gate: int = 14336


SIZES = {"cuda": Size(), "cpu": Size(64, 8, 2, 64, 1024)}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _rope(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    cos, sin = cache[positions].unsqueeze(1).chunk(2, -1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, value = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype)


NATIVE = Ops(_rms_norm, _add, _rope, _silu_and_mul)


def contenders(device: torch.device) -> dict[str, Ops]:
    """Give the authors; operators are defined once a process and device."""
    ours = Ops(*(getattr(torch.ops.torch_ops, op) for op in _OPS))
    made: dict[str, list[Any]] = {"define_impl": [], "custom_op": []}
    for op in _OPS:
        declaration = catalogue()[op]
        platform = torch_ops.Platform.detect(device)
        kernel = torch_ops.select_kernel(op, platform=platform).load()
        name = f"{op}_compile_{device.type}"
        if not hasattr(getattr(torch.ops, _plain.NAMESPACE), name):
            _plain.define(name, declaration, kernel)
            custom = custom_op(
                f"{_plain.NAMESPACE}::{name}_custom",
                kernel,
                mutates_args=(),
                schema=declaration.schema,
            )
            custom.register_fake(declaration.faker)
        for author, suffix in (("define_impl", ""), ("custom_op", "_custom")):
            made[author].append(getattr(getattr(torch.ops, _plain.NAMESPACE), f"{name}{suffix}"))
    plain = {author: Ops(*operators) for author, operators in made.items()}
    return {"native": NATIVE, **plain, "opaque": ours, "inlined": ours}


@contextmanager
def switched(author: str) -> Iterator[None]:
    """Let ours dissolve or not; what others wrote isn't concerned."""
    undo = torch_ops.set_inline(author == "inlined")
    try:
        yield
    finally:
        undo()


def chain(ops: Ops) -> Callable[..., Tensor]:
    """Make a function of `LENGTH` norms."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(LENGTH):
            x = ops.rms_norm(x, weight, _EPS)
        return x

    return run


def block(ops: Ops, size: Size) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a block of Llama: norm, attention, norm, gate; residuals beside."""
    heads, kv_heads, dim = size.heads, size.kv_heads, size.head_dim

    def run(
        x: Tensor, residual: Tensor, norms: Tensor, qkv: Tensor, out: Tensor, up: Tensor,
        down: Tensor, cache: Tensor, positions: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, residual = ops.fused_add_rms_norm(x, residual, norms[0], _EPS)
        packed = (y @ qkv).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = packed.split((heads, kv_heads, kv_heads), 1)
        q, k = ops.apply_rope(q, k, cache, positions, True)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        y = seen[0].transpose(0, 1).reshape(x.shape[0], -1) @ out
        y, residual = ops.fused_add_rms_norm(y, residual, norms[1], _EPS)
        return ops.silu_and_mul(y @ up) @ down, residual

    return run


def arguments_of(size: Size, device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """Give the arguments of both cases, bfloat16 as models have them."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = size.heads * size.head_dim

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return values.div_(shape[0] ** 0.5).bfloat16()

    packed = (size.heads + 2 * size.kv_heads) * size.head_dim
    x, residual = (drawn(size.tokens, hidden) * size.tokens**0.5 for _ in range(2))
    norms = torch.ones(2, hidden, device=device, dtype=torch.bfloat16)
    angles = torch.rand(size.tokens, size.head_dim // 2, device=device, generator=generator)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(size.tokens, device=device)
    weights = (drawn(hidden, packed), drawn(hidden, hidden), drawn(hidden, 2 * size.gate))
    return {
        "chain": (x, norms[0]),
        "block": (x, residual, norms, *weights, drawn(size.gate, hidden), cache, positions),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--device", type=torch.device, help="cpu, cuda (default: what is here)")


@torch.no_grad()
def run(device: torch.device | None = None) -> dict[str, Any]:
    """Measure both cases in every mode of the device."""
    device = device or device_here()
    size = SIZES[device.type]
    modes = ["default", "reduce-overhead"] if device.type == "cuda" else ["default"]
    rows = [
        _row(case, mode, args, size, device)
        for case, args in arguments_of(size, device).items()
        for mode in modes
    ]
    return {
        "benchmark": "compile",
        **machine(device),
        "size": size._asdict(),
        "length": LENGTH,
        "rows": rows,
        "ok": all(row["ok"] for row in rows),
    }


def _row(
    case: str, mode: str, args: tuple[Tensor, ...], size: Size, device: torch.device
) -> dict[str, Any]:
    compiled: dict[str, Callable[[], Any]] = {}
    kernels: dict[str, int] = {}
    torch._dynamo.reset()
    for author, ops in contenders(device).items():
        function: Callable[..., Any] = chain(ops) if case == "chain" else block(ops, size)
        made: Any = torch.compile(_own(function, author), mode=mode, fullgraph=True)
        with switched(author):
            _, sources = run_and_get_code(made, *args)
        kernels[author] = sum(source.count("= async_compile.") for source in sources)
        compiled[author] = functools.partial(made, *args)
    us = _least(compiled, device)
    ratios = {f"{a}/{b}": us[a] / us[b] for a, b in LIMITS}
    ok = all(ratios[f"{a}/{b}"] <= limit for (a, b), limit in LIMITS.items())
    return {"case": case, "mode": mode, "us": us, "kernels": kernels, "ratios": ratios, "ok": ok}


def _own(function: Callable[..., Any], author: str) -> Callable[..., Any]:
    """Copy a function with a code object of its own, whose graphs no other author's go before."""
    code = function.__code__.replace(co_name=author)
    return types.FunctionType(code, function.__globals__, author, None, function.__closure__)


def _least(compiled: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    best = dict.fromkeys(compiled, float("inf"))
    for turn in range(ROUNDS):
        for author, call in list(compiled.items())[:: 1 if turn % 2 else -1]:
            with switched(author):
                _warm_up(call)
                _wait(device)
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                _wait(device)
                best[author] = min(best[author], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def _warm_up(call: Callable[[], Any]) -> None:
    least, most, seconds = WARM_UPS
    end = time.perf_counter() + seconds
    for made in range(most):
        if made >= least and time.perf_counter() > end:
            break
        call()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    authors = list(report["rows"][0]["us"])
    head = "".join(f"{author:>16}" for author in authors)
    lines = [f"Compiled graphs, torch {report['versions']['torch']}: us (generated kernels)"]
    lines.append(f"{'case':8}{'mode':17}{head}")
    for row in report["rows"]:
        cells = "".join(f"{row['us'][a]:10.1f} ({row['kernels'][a]:3})" for a in authors)
        ratios = ", ".join(f"{name} {value:.3f}" for name, value in row["ratios"].items())
        verdict = "ok" if row["ok"] else "OVER"
        lines.append(f"{row['case']:8}{row['mode']:17}{cells}  {ratios}: {verdict}")
    limits = ", ".join(f"{a}/{b} at most {limit}" for (a, b), limit in LIMITS.items())
    return "\n".join([*lines, limits])
