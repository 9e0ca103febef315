"""The kernels of attention layers: that they are different ones, and right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.attention import Attention, AttentionBackend, choice
from torch_ops.attention.choice import refusals
from torch_ops.attention.prepared import Place

from . import support

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# What takes Inductor twenty seconds in each; float32, with a soft cap too, is tried below.
SAMPLED = [
    pytest.param(torch.float32, marks=pytest.mark.exhaustive),
    pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive),
    pytest.param(torch.float16, marks=pytest.mark.exhaustive),
    pytest.param(torch.float64, marks=pytest.mark.exhaustive),
]
TORCH = ["torch_math", "torch_flash"]
KERNELS = {
    ("torch_math", "cpu"): "aten::_scaled_dot_product_attention_math",
    ("torch_flash", "cpu"): "aten::_scaled_dot_product_flash_attention_for_cpu",
    ("torch_math", "cuda"): "aten::_scaled_dot_product_attention_math",
    ("torch_flash", "cuda"): "aten::_scaled_dot_product_flash_attention",
    ("torch_cudnn", "cuda"): "aten::_scaled_dot_product_cudnn_attention",
}
CAPPED: dict[str, Any] = {
    "num_heads": 6,
    "is_causal": True,
    "window_left": 3,
    "logits_soft_cap": 5.0,
}
COMPILED = "Torch-Compiled Region"


def build(backend: str, device: torch.device, dtype: torch.dtype, **options: Any) -> Attention:
    """A layer with this backend; skips with the backend's own reason where it can't run here."""
    geometry = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2} | options
    layer = Attention(**geometry, backend=backend).to(device, dtype)
    reasons = refusals(layer._rules, AttentionBackend(backend), Place(device, dtype))
    if reasons:
        assert device.type != "cpu", reasons
        pytest.skip("; ".join(reasons))
    return layer


def check(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a layer and compare with the exact result."""
    out: Tensor = layer(q, k, v)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert support.worst(out, layer.spec, q, k, v) <= 1
    return out


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("backend", TORCH)
def test_each_torch_backend_runs_its_own_kernel(
    backend: str, queries: int, device: torch.device
) -> None:
    for options in ({}, {"is_causal": True}, {"is_causal": True, "window_left": 2}):
        layer = build(backend, device, torch.bfloat16, **options)
        inputs = support.inputs(layer, queries=queries, device=device, dtype=torch.bfloat16)
        layer(*inputs)
        assert support.sdpa(partial(layer, *inputs)) == {KERNELS[backend, device.type]}


@pytest.mark.exhaustive
def test_inductor_runs_compiled_code(device: torch.device) -> None:
    layer = build("inductor", device, torch.float32, is_causal=True)
    inputs = support.inputs(layer, device=device)
    layer(*inputs)
    seen = support.kernels(lambda: layer(*inputs))
    assert not {name for name in seen if name.startswith(support.SDPA)}
    assert any(name.startswith(COMPILED) for name in seen), seen
    torch_layer = build("torch_math", device, torch.float32)
    seen = support.kernels(lambda: torch_layer(*inputs))
    assert not any(name.startswith(COMPILED) for name in seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window_left": 0},
        {"is_causal": True, "window_left": 3},
        {"window_left": 5, "scale": 0.7},
        {"is_causal": True, "scale": -0.3},
        {"is_causal": True, "scale": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", TORCH)
def test_values(
    backend: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    layer = build(backend, device, dtype, **options)
    for queries, keys in ((1, 1), (1, 9), (4, 9), (9, 9), (9, 4), (9, 1), (33, 65)):
        check(layer, *support.inputs(layer, 2, queries, keys, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", SAMPLED, ids=str)
def test_values_of_inductor(dtype: torch.dtype, device: torch.device) -> None:
    layer = build("inductor", device, dtype, **CAPPED)
    for queries, keys in ((4, 9), (9, 9), (9, 4), (33, 65)):
        check(layer, *support.inputs(layer, 2, queries, keys, device=device, dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("backend", TORCH)
def test_groups_of_query_heads(
    backend: str, queries: int, group: int, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = build(backend, device, dtype, num_heads=3 * group, num_kv_heads=3, is_causal=True)
        q, k, v = support.inputs(layer, 2, queries, 7, device=device, dtype=dtype)
        grouped = check(layer, q, k, v)
        single = Attention(3 * group, 16, is_causal=True, backend=backend).to(device, dtype)
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        repeated = check(single, q, k, v)
        _, bound = support.oracle(single.spec, q, k, v)
        assert ((grouped.double() - repeated.double()).abs().cpu() <= 2 * bound).all()


@pytest.mark.parametrize("head_dim", [1, 3, 8, 40, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("backend", TORCH)
def test_head_dims(backend: str, head_dim: int, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        layer = build(backend, device, dtype, head_dim=head_dim, is_causal=True)
        for queries in (1, 3):
            check(layer, *support.inputs(layer, 2, queries, 5, device=device, dtype=dtype))


def test_inductor_takes_any_number_of_shapes(device: torch.device) -> None:
    layer = build("inductor", device, torch.float32, is_causal=True)
    layer(*support.inputs(layer, 3, 5, 7, device=device))
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for batch in (2, 3, 16):
        for queries in (2, 5, 16):
            for keys in (2, 5, 30):
                check(layer, *support.inputs(layer, batch, queries, keys, device=device))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():  # tensors made in inference mode are another kind
            layer(*support.inputs(layer, device=device))
    assert counters["unique_graphs"] == before, "it was compiled again"
    for shape in ((2, 1, 5), (3, 1, 6), (16, 1, 17)):
        check(layer, *support.inputs(layer, *shape, device=device))
    assert counters["unique_graphs"] <= before + 1, "one for each class of sizes that are one"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "longer buffer": lambda x: _within(x, [x.shape[0], x.shape[1] + 11, *x.shape[2:]]),
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "longer buffer, heads first": lambda x: _within(
        x.transpose(1, 2), [x.shape[0], x.shape[2], x.shape[1] + 5, x.shape[3]]
    ).transpose(1, 2),
    "part of a fused projection": lambda x: _within(x, [*x.shape[:2], 3 * x.shape[2], x.shape[3]]),
    "wider heads": lambda x: _within(x, [*x.shape[:3], x.shape[3] + 1]),
    "strided elements": lambda x: torch.stack([x, x * 3], -1)[..., 0],
    "offset by one element": lambda x: _within(x.flatten(), [x.numel() + 1], 1).view(x.shape),
}


def _within(x: Tensor, shape: list[int], start: int = 0) -> Tensor:
    """The same values as a part of a buffer that is NaN elsewhere."""
    buffer = x.new_full(shape, float("nan"))
    part = buffer[tuple(slice(start, start + size) for size in x.shape)]
    part.copy_(x)
    return part


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("backend", [*TORCH, "inductor"])
def test_strided_inputs(backend: str, queries: int, layout: str, device: torch.device) -> None:
    layer = build(backend, device, torch.float32, is_causal=True)
    q, k, v = support.inputs(layer, 2, queries, 9, device=device)
    there = LAYOUTS[layout]
    check(layer, q, there(k), there(v))
    check(layer, there(q), there(k), there(v))
    check(layer, there(q), k, v)


@pytest.mark.parametrize("backend", TORCH)
def test_expanded_keys(backend: str, device: torch.device) -> None:
    layer = build(backend, device, torch.float32, num_kv_heads=4)
    q, k, v = support.inputs(layer, device=device)
    k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    check(layer, q, k, v)
    batch = torch.randn(1, 5, 4, 16, device=device).expand(2, -1, -1, -1)
    check(layer, q, batch, batch)


@pytest.mark.parametrize("backend", [*TORCH, "inductor"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_zero_sizes(
    backend: str, is_causal: bool, batch: int, queries: int, keys: int, device: torch.device
) -> None:
    layer = build(backend, device, torch.float32, is_causal=is_causal)
    q, k, v = support.inputs(layer, batch, queries, keys, device=device)
    out = layer(q, k, v)
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert not out.any(), "a row without keys is zero"
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", TORCH)
def test_rows_without_keys_are_zero(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    for window in (-1, 1):
        layer = build(backend, device, dtype, is_causal=True, window_left=window)
        q, k, v = support.inputs(layer, 2, 7, 3, device=device, dtype=dtype)
        out = check(layer, q, k, v)
        assert not out[:, :4].any()
        assert out[:, 4:].any(-1).all()
        # What stands in a row without keys has no influence on the others.
        q[:, :4] = float("nan")
        assert torch.equal(layer(q, k, v), out)


@pytest.mark.parametrize("backend", [*TORCH, "inductor"])
def test_causality(backend: str, device: torch.device) -> None:
    layer = build(backend, device, torch.float32, is_causal=True)
    q, k, v = support.inputs(layer, 2, 4, 9, device=device)
    out = layer(q, k, v)
    k[:, 7:], v[:, 7:] = 50.0, -50.0
    changed = layer(q, k, v)
    assert torch.equal(changed[:, :2], out[:, :2])
    assert not torch.equal(changed[:, 2:], out[:, 2:])


@pytest.mark.parametrize("backend", TORCH)
def test_one_query_is_the_last_row(backend: str, device: torch.device) -> None:
    layer = build(backend, device, torch.float32, is_causal=True)
    q, k, v = support.inputs(layer, 2, 6, 6, device=device)
    for row in range(6):
        one = q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1]
        _, bound = support.oracle(layer.spec, *one)
        prefilled = layer(q, k, v)[:, row : row + 1]
        assert ((layer(*one) - prefilled).abs().cpu() <= 2 * bound).all()


@pytest.mark.parametrize(
    ("built", "judged"),
    [
        ({"is_causal": True}, {}),
        ({}, {"is_causal": True}),
        ({"is_causal": True, "window_left": 3}, {"is_causal": True, "window_left": 4}),
        ({"is_causal": True, "window_left": 3}, {"is_causal": True, "window_left": 2}),
        ({"scale": 0.25}, {"scale": 0.26}),
        ({}, {"logits_soft_cap": 5.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_refuses_another_rule(
    built: dict[str, Any], judged: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = Attention(4, 16, 2, backend="torch_math", **built)
    inputs = support.inputs(layer, 2, 9, 12, dtype=dtype)
    out = layer(*inputs)
    assert support.worst(out, layer.spec, *inputs) <= 1
    assert support.worst(out, Attention(4, 16, 2, **judged).spec, *inputs) > 1
    shifted = out.roll(1, dims=2)
    assert support.worst(shifted, layer.spec, *inputs) > 1


@pytest.mark.parametrize("backend", TORCH)
def test_soft_caps_are_refused_where_the_kernel_has_none(
    backend: str, device: torch.device
) -> None:
    layer = Attention(4, 16, 2, logits_soft_cap=30.0, backend=backend).to(device)
    text = f"backend '{backend}', chosen by layer, can't serve"
    with pytest.raises(torch_ops.BackendUnavailableError, match=text) as error:
        layer(*support.inputs(layer, device=device))
    assert error.value.reasons == ("logits_soft_cap 30.0 (supported: 0.0)",)


@pytest.mark.usefixtures("uncompiled_attention")
def test_soft_caps_skip_to_the_next_family_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice._logged.clear()
    layer = Attention(6, 16, 2, **{key: CAPPED[key] for key in CAPPED if key != "num_heads"})
    inputs = support.inputs(layer)
    with torch_ops.trace() as trace, caplog.at_level("INFO", "torch_ops.attention.choice"):
        out = layer(*inputs)
        layer(*inputs)
    assert support.worst(out, layer.spec, *inputs) <= 1
    reason = "logits_soft_cap 5.0 (supported: 0.0)"
    (record,) = trace.records
    assert (record.op, record.source, record.count) == ("attention", "declared", 2)
    assert record.backend is AttentionBackend.INDUCTOR
    assert record.skipped == (("torch_flash", reason), ("torch_math", reason))
    messages = [r.getMessage() for r in caplog.records if reason in r.getMessage()]
    assert messages == [
        f"degraded: Attention skips backend '{name}': {reason}"
        for name in ("torch_flash", "torch_math")
    ]


@pytest.mark.parametrize("backend", [*TORCH, "inductor"])
def test_autocast_changes_nothing(backend: str, device: torch.device) -> None:
    layer = build(backend, device, torch.float32, is_causal=True)
    inputs = support.inputs(layer, device=device)
    out = layer(*inputs)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(layer(*inputs), out)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*inputs), out)


@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_autocast_changes_nothing_in_the_ops(op: str, device: torch.device) -> None:
    packet = getattr(torch.ops.torch_ops, op)
    q, k, v = support.inputs(Attention(4, 16, 2), device=device)

    def calls() -> list[Tensor]:
        named = packet.backend(q, k, v, True, None, -1, 0.0, "torch")
        outs = [packet(q, k, v, True), named]
        return [x for out in outs for x in (out if isinstance(out, tuple) else (out,))]

    plain = calls()
    with torch.autocast(device.type, torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(calls(), plain, strict=True))
        compiled = torch.compile(calls, backend="aot_eager", fullgraph=True)
        assert all(torch.equal(a, b) for a, b in zip(compiled(), plain, strict=True))
