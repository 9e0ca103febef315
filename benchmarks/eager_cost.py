"""What the op costs over its kernel: a call in eager code, and a chain of calls in a graph.

Eager: host time of a call through ``torch.ops.torch_ops.<op>`` and through
``torch_ops.ops.<op>``, less that of calling the chosen kernel's own function on the same arguments,
which allocates its results as it does below the op. Beside it stands what PyTorch's dispatcher
costs (``define`` and ``impl``, nothing of ours), and what all argument checks would. Compiled: host
time of a graph of `LENGTH` calls, over that of a graph of the same kernel behind ``define`` and
``impl``. All in turns of short bursts on tiny tensors, the GPU idle; the least counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_ops
from benchmarks import _measure, _plain
from benchmarks._calls import kernel_of
from torch_ops.declarations import catalogue

LIMIT_US, GOAL_US = 3.5, 2.5  # a call through the op, less its kernel
LENGTH, LIMIT_RATIO = 16, 1.05
ROUNDS, CALLS = 150, 20
GRAPH_ROUNDS, GRAPH_CALLS = 150, 4
WAYS = ("operator", "callable")
MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
_Arguments = tuple[Any, ...]
_numbers = itertools.count()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option: which mode of eager code."""
    parser.add_argument(
        "--mode", choices=sorted(MODES), help="only this, and on the GPU alone where there is one"
    )


def run(mode: str | None = None) -> dict[str, Any]:
    """Measure on this machine's GPU, where it has one, and eager code on its CPU, too."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {"benchmark": "eager_cost", **_measure.machine(_measure.device_here())}
    first = _measure.device_here()
    devices = dict.fromkeys((first, torch.device("cpu"))) if mode is None else (first,)
    report["eager"] = [
        _eager(op, each, device)
        for device in devices
        for op in arguments_of(device)
        for each in ([mode] if mode else MODES)
    ]
    report["compiled"] = [_compiled(op, first) for op in arguments_of(first) if op in CHAINED]
    report["load_after"] = _measure.load()
    report["ok"] = all(row["ok"] for row in (*report["eager"], *report["compiled"]))
    return report


def arguments_of(device: torch.device) -> dict[str, _Arguments]:
    """Give tiny arguments of the ops that are measured, in bfloat16."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight, bias = new(1, 64), new(1, 64), new(64), new(64)
    angle = torch.arange(32, device=device) / 32
    cache = torch.cat([angle.cos(), angle.sin()]).expand(4, 64).contiguous()
    rope = (new(1, 4, 64), new(1, 2, 64), cache, torch.ones(1, dtype=torch.int64, device=device))
    parts = [(new(1, 4, 64), new(1, 4, dtype=torch.float32)) for _ in "ab"]
    kv, slots = [new(1, 2, 64) for _ in "kv"], torch.ones(1, dtype=torch.int64, device=device)
    min_p = torch.full((1,), 0.1, device=device)
    return {
        "rms_norm": (x, weight, 1e-6),
        "gemma_rms_norm": (x, weight, 1e-6),
        "layer_norm": (x, weight, bias, 1e-5),
        "fused_add_rms_norm": (x, residual, weight, 1e-6),
        "silu_and_mul": (new(1, 128),),
        "gelu_and_mul": (new(1, 128),),
        "apply_rope": rope,
        "apply_rope_": rope,
        "merge_state": (*parts[0], *parts[1]),
        "append_paged_kv_": (*kv, *(new(2, 16, 2, 64) for _ in kv), slots),
        "apply_rope_append_paged_kv_": (
            rope[0],
            *kv,
            *rope[2:],
            *(new(2, 16, 2, 64) for _ in kv),
            slots,
        ),
        "quantize_fp8_per_token": (x,),
        "rms_norm_quant_fp8": (x, weight, 1e-6),
        "silu_and_mul_quant_fp8": (new(1, 128),),
        "topk_softmax": (new(1, 64), 2, True),
        "min_p_filter": (new(1, 64, dtype=torch.float32).softmax(-1), min_p),
    }


# Their results are their first arguments again; a gate's are half as wide.
CHAINED = (
    "rms_norm", "gemma_rms_norm", "layer_norm", "fused_add_rms_norm", "apply_rope", "apply_rope_",
    "merge_state",
)  # fmt: skip


def chosen(op: str, args: _Arguments) -> tuple[str, Callable[..., Any]]:
    """Run an op and give the backend that ran, and its kernel's own function."""
    with torch.no_grad(), torch_ops.trace() as seen:
        getattr(torch.ops.torch_ops, op)(*args)
    backend = seen.records[0].backend.value
    return backend, kernel_of(op, backend)


def _eager(op: str, mode: str, device: torch.device) -> dict[str, Any]:
    args = arguments_of(device)[op]
    backend, kernel = chosen(op, args)
    declaration = catalogue()[op]

    def checked(*call: Any) -> Any:
        declaration.check_call(*call)
        return kernel(*call)

    ways = {
        "direct": kernel,
        "dispatcher": _plain.define(f"{op}_{next(_numbers)}", declaration, kernel),
        "checks": checked,
        "operator": getattr(torch.ops.torch_ops, op),
        "callable": getattr(torch_ops.ops, op),
    }
    calls = {name: functools.partial(call, *args) for name, call in ways.items()}
    with MODES[mode]():
        us = _measure.least(calls, ROUNDS, CALLS, device)
    over = {name: round(us[name] - us["direct"], 3) for name in ways if name != "direct"}
    return {
        "op": op, "mode": mode, "device": device.type, "backend": backend,
        "direct_us": round(us["direct"], 3), "over_us": {way: over[way] for way in WAYS},
        "limit_us": LIMIT_US, "ok": all(over[way] <= LIMIT_US for way in WAYS),
        "dispatcher_us": over["dispatcher"], "checks_us": over["checks"],
    }  # fmt: skip


def chain(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of `LENGTH` calls, each on the results of the one before."""

    def chained(*args: Any) -> Any:
        for _ in range(LENGTH):
            result = call(*args)
            results = (result,) if isinstance(result, Tensor) else tuple(result or ())
            args = (*results, *args[len(results) :])
        return args[:2]

    return chained


def _compiled(op: str, device: torch.device) -> dict[str, Any]:
    args = arguments_of(device)[op]
    backend, kernel = chosen(op, args)
    plain = _plain.define(f"{op}_{next(_numbers)}", catalogue()[op], kernel)
    calls = {}
    torch._dynamo.reset()
    undo = torch_ops.set_inline(False)  # both are calls
    with torch.no_grad():
        for name, call in (("direct", plain), ("op", getattr(torch.ops.torch_ops, op))):
            graph = torch.compile(chain(call), fullgraph=True)
            calls[name] = functools.partial(graph, *args)
            calls[name]()
        us = _measure.least(calls, GRAPH_ROUNDS, GRAPH_CALLS, device)
    undo()
    ratio = us["op"] / us["direct"]
    return {
        "op": op, "device": device.type, "backend": backend, "calls": LENGTH,
        "direct_us": round(us["direct"], 2), "op_us": round(us["op"], 2),
        "ratio": round(ratio, 4), "limit": LIMIT_RATIO, "ok": ratio <= LIMIT_RATIO,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    eager = "{:24}{:8}{:16}{:12}{:>9}{:>10}{:>10}{:>12}{:>9}"
    compiled = "{:24}{:8}{:28}{:>9}{:>9}{:>9}"
    lines = [
        f"{report['device']}, {versions}, load {report['load'][0]} before and "
        f"{report['load_after'][0]} after",
        f"eager, us a call; operator and callable, over direct: at most {LIMIT_US} "
        f"(goal {GOAL_US})",
        eager.format("op", "device", "mode", "backend", "direct", *WAYS, "dispatcher", "checks"),
    ]
    names = ("op", "device", "mode", "backend")
    for row in report["eager"]:
        over = [row["over_us"][way] for way in WAYS]
        numbers = [row["direct_us"], *over, row["dispatcher_us"], row["checks_us"]]
        cells = [*(row[name] for name in names), *(f"{number:.2f}" for number in numbers)]
        lines.append(f"{eager.format(*cells)}  {_verdict(row)}")
    lines.append(f"compiled, us for {LENGTH} calls, at most {LIMIT_RATIO} of define + impl")
    lines.append(compiled.format("op", "device", "backend", "direct", "op", "ratio"))
    for row in report["compiled"]:
        numbers = [f"{row['direct_us']:.2f}", f"{row['op_us']:.2f}", f"{row['ratio']:.3f}"]
        cells = [row["op"], row["device"], row["backend"], *numbers]
        lines.append(f"{compiled.format(*cells)}  {_verdict(row)}")
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    over = row.get("over_us", {})
    if not row["ok"]:
        named = [way for way in over if over[way] > LIMIT_US]
        return " ".join(["OVER", *named])
    return "ok, over the goal" if max(over.values(), default=0.0) > GOAL_US else "ok"
