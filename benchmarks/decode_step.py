"""A decode step of a model of Llama-3.1-8B's shape: swappable layers against a hard-wired kernel.

Random bfloat16 weights, whole model under ``mode="reduce-overhead"``, paged cache, 16 sequences of
1024 tokens. Both run the same kernel with the same ops around it; the hard-wired one sits behind
``define`` and ``impl`` and can't be swapped. Steps are timed in turns; the medians count. Then the
host time of an override, of the first step after it, and of the first one after going back.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_ops
from benchmarks import _measure
from torch_ops import ops
from torch_ops.attention import Attention, AttentionMetadata, override_attention_backend

HIDDEN, FEED, HEADS, KV_HEADS, HEAD_DIM, PAGE, LAYERS = 4096, 14336, 32, 8, 128, 16, 32
BATCH, LENGTH = 16, 1024
SMALL = {"hidden": 64, "feed": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
LIMIT, LIMIT_SWAP_US = 1.05, 100.0
TURNS, STEPS = 15, 5
_library = torch.library.Library("torch_ops_hard_wired", "FRAGMENT")
_library.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor indptr, Tensor indices, Tensor last) -> Tensor"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` takes."""
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model")


class _HardWired(nn.Module):
    """One kernel behind an opaque operator, as somebody who never swaps would write it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        tables = metadata.tables
        out: Tensor = torch.ops.torch_ops_hard_wired.decode(
            q, k, v, tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len
        )
        return out


class _Layer(nn.Module):
    """Norms, projections, rotary embedding and gate by ops; attention by what it is given."""

    def __init__(self, attention: nn.Module, shape: dict[str, int], device: torch.device) -> None:
        super().__init__()
        hidden, feed, d = shape["hidden"], shape["feed"], shape["head_dim"]
        self.heads, self.kv_heads, self.head_dim = shape["heads"], shape["kv_heads"], d
        self.attention = attention

        def weight(*size: int) -> nn.Parameter:
            value = torch.empty(size, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
            return nn.Parameter(value, requires_grad=False)

        self.qkv = weight((self.heads + 2 * self.kv_heads) * d, hidden)
        self.out = weight(hidden, self.heads * d)
        self.gate_up, self.down = weight(2 * feed, hidden), weight(hidden, feed)
        self.first, self.second = weight(hidden), weight(hidden)

    def forward(
        self, x: Tensor, residual: Tensor, cache: Tensor, rope: Tensor, step: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        rows, d = x.shape[0], self.head_dim
        normed, residual = ops.fused_add_rms_norm(x, residual, self.first)
        parts = [n * d for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(rows, -1, d) for part in (normed @ self.qkv.T).split(parts, 1))
        q, k = ops.apply_rope(q, k, rope, step["positions"])
        ops.append_paged_kv_(k, v, cache[0], cache[1], step["slots"])
        attended = self.attention(q, cache[0], cache[1], step["metadata"])
        projected = attended.reshape(rows, -1) @ self.out.T
        normed, residual = ops.fused_add_rms_norm(projected, residual, self.second)
        return ops.silu_and_mul(normed @ self.gate_up.T) @ self.down.T, residual


class _Model(nn.Module):
    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, caches: Tensor, rope: Tensor, step: dict[str, Any]) -> Tensor:
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, rope, step)
        return x + residual


def run(layers: int = LAYERS) -> dict[str, Any]:
    """Measure on this machine's GPU, or check the form on its CPU."""
    device = _measure.device_here()
    on_gpu = device.type == "cuda"
    shape = {
        "hidden": HIDDEN, "feed": FEED, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
    } if on_gpu else SMALL  # fmt: skip
    batch, length, backend = (BATCH, LENGTH, "triton") if on_gpu else (2, 20, "torch_math")
    layers = layers if on_gpu else 2
    kernel = torch_ops.get_kernel("paged_decode", "triton" if on_gpu else "torch")
    key = "CUDA" if on_gpu else "CPU"
    _library.impl("decode", kernel, key, allow_override=True)
    _library._register_fake("decode", lambda q, *rest: torch.empty_like(q), allow_override=True)
    models = _models(layers, shape, device)
    inputs = _inputs(layers, shape, batch, length, device)
    report: dict[str, Any] = {"benchmark": "decode_step", **_measure.machine(device)}
    with torch.no_grad(), torch_ops.use_backend(attention="triton" if on_gpu else "torch"):
        models["ours"](*inputs)  # tells the layers that they serve paged calls
    override_attention_backend(models["ours"], backend)
    mode = "reduce-overhead" if on_gpu else "default"
    compiled = {n: torch.compile(m, mode=mode, fullgraph=True) for n, m in models.items()}
    with torch.no_grad():
        report["difference"] = _difference(compiled, inputs)
        report["ms"] = _times(compiled, inputs, device)
        report["swap"] = _swaps(models["ours"], compiled["ours"], inputs, backend, device)
    report["ratio"] = round(report["ms"]["ours"] / report["ms"]["hard-wired"], 4)
    report |= {"layers": layers, "batch": batch, "length": length, "backend": backend}
    right = report["difference"] == 0.0
    report["ok"] = right and (not on_gpu or report["ratio"] <= LIMIT)
    return report


def _models(layers: int, shape: dict[str, int], device: torch.device) -> dict[str, _Model]:
    """Two models on the same weights."""

    def attention() -> Attention:
        made = Attention(shape["heads"], shape["head_dim"], shape["kv_heads"], is_causal=True)
        return made.to(device, torch.bfloat16)

    ours = [_Layer(attention(), shape, device) for _ in range(layers)]
    wired = []
    for layer in ours:
        twin = _Layer.__new__(_Layer)
        nn.Module.__init__(twin)
        twin.__dict__.update({k: v for k, v in layer.__dict__.items() if not k.startswith("_")})
        for name, value in layer.named_parameters():
            setattr(twin, name, value)
        twin.attention = _HardWired()
        wired.append(twin)
    return {"ours": _Model(ours), "hard-wired": _Model(wired)}


def _inputs(
    layers: int, shape: dict[str, int], batch: int, length: int, device: torch.device
) -> tuple[Any, ...]:
    each = -(-length // PAGE)
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0))
    pages = order.view(batch, each).tolist()
    metadata = AttentionMetadata.paged(
        [1] * batch, [length] * batch, pages, page_size=PAGE, num_pages=batch * each, device=device
    )
    size = (layers, 2, batch * each, PAGE, shape["kv_heads"], shape["head_dim"])
    caches = torch.randn(size, device=device, dtype=torch.bfloat16)
    torch._dynamo.mark_static_address(caches)  # else CUDA graphs refuse inputs that are written
    d = shape["head_dim"]
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, d, 2) / d))
    rope = torch.cat([angle.cos(), angle.sin()], 1).to(device)
    slots = [own[(length - 1) // PAGE] * PAGE + (length - 1) % PAGE for own in pages]
    step = {
        "metadata": metadata,
        "positions": torch.full((batch,), length - 1, device=device),
        "slots": torch.tensor(slots, device=device),
    }
    x = torch.randn(batch, shape["hidden"], device=device, dtype=torch.bfloat16)
    return x, caches, rope, step


def _difference(compiled: dict[str, Callable[..., Tensor]], inputs: tuple[Any, ...]) -> float:
    outputs = []
    for call in compiled.values():
        for _ in range(4):  # compiles, warms up, records, replays
            last = call(*inputs).clone()
        outputs.append(last)
    return float((outputs[0].float() - outputs[1].float()).abs().max())


def _times(
    compiled: dict[str, Callable[..., Tensor]], inputs: tuple[Any, ...], device: torch.device
) -> dict[str, float]:
    """Give the median of milliseconds a step."""
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(TURNS):
        for name, call in compiled.items():
            steps = functools.partial(_repeat, call, inputs)
            times[name].append(_measure.timed(steps, device)[0])
    return {name: round(statistics.median(own) / STEPS, 4) for name, own in times.items()}


def _repeat(call: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
    for _ in range(STEPS):
        call(*inputs)


def _swaps(
    model: _Model,
    call: Callable[..., Tensor],
    inputs: tuple[Any, ...],
    backend: str,
    device: torch.device,
) -> dict[str, Any]:
    """Swap to another family and back, three times; both are prepared by the first time."""
    other = _another(model)
    rows: dict[str, Any] = {"to": other, "override_us": [], "first_step_ms": [], "step_ms": []}
    for target in (other, backend) * 3:
        swap = functools.partial(override_attention_backend, model, target)
        rows["override_us"].append(round(_measure.timed(swap, device)[0] * 1e3, 1))
        rows["first_step_ms"].append(round(_measure.timed(lambda: call(*inputs), device)[0], 3))
        _repeat(call, inputs)
        rows["step_ms"].append(
            round(_measure.timed(functools.partial(_repeat, call, inputs), device)[0] / STEPS, 3)
        )
    return rows


def _another(model: _Model) -> str:
    """Prepare another family, FlashInfer's where it is installed, and give its name."""
    for name in ("flashinfer_fa2", "torch_math"):
        try:
            override_attention_backend(model, name).undo()
        except torch_ops.AttentionOverrideError:
            continue
        return name
    raise AssertionError("torch_math serves every paged call")


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    swap, ms = report["swap"], report["ms"]
    return "\n".join(
        [
            f"{report['device']}, {versions}",
            f"{report['layers']} layers, batch {report['batch']} x {report['length']}, "
            f"{report['backend']}: {ms['ours']} ms, hard-wired {ms['hard-wired']} ms, ratio "
            f"{report['ratio']} (at most {LIMIT}), outputs differ by {report['difference']}",
            f"swaps to {swap['to']} and back: override {swap['override_us']} us, "
            f"first step {swap['first_step_ms']} ms, later ones {swap['step_ms']} ms",
            "ok" if report["ok"] else "NOT OK",
        ]
    )
