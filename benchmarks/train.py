"""What a step of training costs: forward and backward of each differentiable op.

The op in eager and in compiled code beside plain PyTorch written by hand, in both, too: the medians
of a step on sizes of models, and the bytes that each keeps until its backward, arguments without
gradients left out. Gradients have to be as near to those of float64 as the eager ones by hand, to
twice their error and one rounding; the report isn't ok where they aren't, or where the op keeps
more than the eager code by hand does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import torch_ops
from benchmarks import _calls, _measure
from torch_ops.declarations import catalogue
from torch_ops.testing.arguments import build

CHOSEN = {"apply_rope": "llama3-8b, 4096", "attention": "llama3-8b, 1, 4096x4096"}
"""Named Specs of a GPU's calls, where it isn't the largest one of up to `LARGEST` elements."""
LARGEST, SMALL = 2**26, 2**15
LEFT_OUT = {
    "attention_with_lse": "it is what attention runs, and plain PyTorch has no LSE",
}
MILLISECONDS = 100
_Function = Callable[..., Any]


class _Step(NamedTuple):
    """A call to differentiate: by position, gradients of its outputs, and where it wants them."""

    args: tuple[Any, ...]
    grads: tuple[Tensor, ...]
    wanted: tuple[int, ...]


def run() -> dict[str, Any]:
    """Measure on this machine's GPU in bfloat16, or on its CPU in float32."""
    device = _measure.device_here()
    report: dict[str, Any] = {"benchmark": "train", **_measure.machine(device), "rows": []}
    for op, declaration in sorted(catalogue().items()):
        if declaration.gradient is not None and op not in LEFT_OUT:
            report["rows"].append(_row(op, device))
    report["load_after"] = _measure.load()
    report["ok"] = all(row["ok"] for row in report["rows"])
    return report


def _row(op: str, device: torch.device) -> dict[str, Any]:
    """Compare the ways of one op."""
    torch._dynamo.reset()
    name, step = _step(op, device)
    by_hand, ours = BY_HAND.get(op, catalogue()[op].reference), getattr(torch.ops.torch_ops, op)
    ways: dict[str, _Function] = {
        "ours": ours,
        "by hand": by_hand,
        "ours, compiled": torch.compile(ours, fullgraph=True),
        "by hand, compiled": torch.compile(by_hand, fullgraph=True),
    }
    exact = _gradients(by_hand, _wide(step))
    errors = {way: _errors(_gradients(call, step), exact) for way, call in ways.items()}
    cells: dict[str, dict[str, Any]] = {}
    for way, call in ways.items():
        found = _measure.spread(lambda call=call: _gradients(call, step), device, MILLISECONDS)  # type: ignore[misc]
        cells[way] = {**found._asdict(), "kept": _kept(call, step)}
    unit = torch.finfo(step.grads[0].dtype).eps / 2
    near = all(
        mine <= 2 * theirs + unit * size
        for mine, theirs, size in zip(
            errors["ours"], errors["by hand"], map(_size, exact), strict=True
        )
    )
    ok = near and cells["ours"]["kept"] <= cells["by hand"]["kept"]
    with torch_ops.trace() as seen:
        _gradients(ours, step)
    ran = [f"{record.backend.value} {record.op}" for record in seen.records]
    return {"op": op, "name": name, "ran": ran, "cells": cells, "near": near, "ok": ok}


def _step(op: str, device: torch.device) -> tuple[str, _Step]:
    """Make the call of a row, with normal gradients of its outputs."""
    declaration = catalogue()[op]
    specs = _calls.named(op, "bfloat16" if device.type == "cuda" else "float32")
    limit = LARGEST if device.type == "cuda" else SMALL
    sizes = {name: _elements(spec) for name, spec in specs.items()}
    fitting = [name for name in specs if sizes[name] <= limit]
    name = max(fitting, key=sizes.__getitem__)
    if device.type == "cuda":
        name = CHOSEN.get(op, name)
    args = build(specs[name], device)
    wanted = tuple(
        index
        for index, (key, value) in enumerate(args.items())
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and declaration.gradient is not None
        and key not in declaration.gradient.constants
    )
    values = tuple(args.values())
    for index in wanted:
        values[index].requires_grad_()
    outputs = _tuple(getattr(torch.ops.torch_ops, op)(*values))
    return name, _Step(values, tuple(torch.randn_like(o) for o in outputs), wanted)


def _elements(spec: Any) -> int:
    args = _calls.on_meta(spec)
    return max(value.numel() for value in args.values() if isinstance(value, Tensor))


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _wide(step: _Step) -> _Step:
    """The same in float64; what has no gradient stays what it is."""
    args = list(step.args)
    for index in step.wanted:
        args[index] = args[index].detach().double().requires_grad_()
    return _Step(tuple(args), tuple(grad.double() for grad in step.grads), step.wanted)


def _gradients(call: _Function, step: _Step) -> tuple[Tensor, ...]:
    outputs = _tuple(call(*step.args))
    return torch.autograd.grad(outputs, [step.args[i] for i in step.wanted], step.grads)


def _errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [_size(got.double() - value) for got, value in zip(found, exact, strict=True)]


def _size(x: Tensor) -> float:
    return float(x.abs().max())


def _kept(call: _Function, step: _Step) -> int:
    """Give the bytes that autograd keeps, each memory once."""
    constants = {
        arg.untyped_storage().data_ptr()
        for index, arg in enumerate(step.args)
        if isinstance(arg, Tensor) and index not in step.wanted
    }
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(*step.args)
    return sum(s.nbytes() for address, s in kept.items() if address not in constants)


def _gate(activation: Callable[[Tensor], Tensor]) -> _Function:
    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return activation(first) * second

    return gate


def _rope(
    q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, is_neox: bool
) -> tuple[Tensor, ...]:
    cos, sin = (part.unsqueeze(1) for part in cache[positions].chunk(2, -1))
    width = cache.shape[-1]

    def turned(x: Tensor) -> Tensor:
        part = x[..., :width].to(torch.promote_types(x.dtype, torch.float32))
        a, b = part.chunk(2, -1) if is_neox else (part[..., 0::2], part[..., 1::2])
        pairs = a * cos - b * sin, b * cos + a * sin
        joined = torch.cat(pairs, -1) if is_neox else torch.stack(pairs, -1).flatten(-2)
        return torch.cat([joined.to(x.dtype), x[..., width:]], -1)

    return turned(q), turned(k)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, *_: Any
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


BY_HAND: dict[str, _Function] = {
    "apply_rope": _rope,
    "attention": _attention,
    "fused_add_rms_norm": _add_norm,
    "gelu_and_mul": _gate(functional.gelu),
    "gelu_tanh_and_mul": _gate(lambda x: functional.gelu(x, approximate="tanh")),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "silu_and_mul": _gate(functional.silu),
}
"""Plain PyTorch, by op; the declared reference, as PyTorch runs it, for any other one."""


def table(report: dict[str, Any]) -> str:
    """Format the report: microseconds of a step and bytes kept, of every way."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}, {versions}"]
    for row in report["rows"]:
        lines.append(f"{row['op']} {row['name']}: {', '.join(row['ran'])}")
        base = row["cells"]["by hand"]["us"]
        for way, cell in row["cells"].items():
            lines.append(
                f"  {way:20}{cell['us']:12.1f} us {cell['us'] / base:6.2f}x "
                f"{cell['kept'] / 1e6:10.3f} MB kept"
            )
        if not row["ok"]:
            lines.append(
                "  RED: " + ("keeps more than by hand" if row["near"] else "far off float64")
            )
    return "\n".join([*lines, "ok" if report["ok"] else "NOT OK"])
