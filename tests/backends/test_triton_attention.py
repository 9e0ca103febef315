"""Triton attention: interpreted, compiled for absent GPUs, its choices, and run on a GPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.attention import AttentionBackend
from torch_ops.platform import Platform

from . import attention_compiled, attention_interpreted, workers
from .rows_compiled import BACKEND, recorded
from .rows_compiled import compiled as compiled_for

pytest.importorskip("triton", reason="triton is not installed")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


def _module(name: str) -> Any:
    return importlib.import_module(f"{BACKEND}.{name}")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's processes found."""
    return workers.in_processes(
        "attention_interpreted", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore"
    )


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    return workers.in_processes(
        "attention_compiled", TRITON_CACHE_DIR=str(workers.ROOT / ".cache" / "triton")
    )


@pytest.mark.parametrize("check", attention_interpreted.checks())
def test_interpreted(interpreted: dict[str, str | None], check: str) -> None:
    assert check in interpreted, f"not run; there are {len(interpreted)}"
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.parametrize("check", attention_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_compiles_in_every_dtype_with_every_head_dim() -> None:
    cache = str(workers.ROOT / ".cache" / "triton")
    workers.everything(attention_compiled, TRITON_CACHE_DIR=cache)


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 17, 65])
@pytest.mark.parametrize("lane", [1, 8])
def test_tiles_fit_and_are_multiples_of_what_products_need(
    arch: str, width: int, itemsize: int, rows: int, lane: int
) -> None:
    ours = _module("_attention")
    chosen = ours.config(arch, itemsize, width, rows, lane)
    assert chosen == ours.config(arch, itemsize, width, rows, lane)
    assert lane > 1 or chosen.block_m <= 32
    assert min(chosen.block_m, chosen.block_n) >= 16
    assert chosen.stages >= 1
    staged = 2 * chosen.stages * chosen.block_n * width * itemsize
    assert staged <= ours.shared_memory(arch)


@pytest.mark.parametrize(("value_dim", "asynchronous"), [(24, True), (21, False)])
def test_elements_loaded_one_by_one_stay_out_of_products_under_way(
    value_dim: int, asynchronous: bool
) -> None:
    q = torch.zeros(1, 50, 2, 64, dtype=torch.float16)
    v = torch.zeros(1, 50, 2, value_dim, dtype=torch.float16)
    with attention_compiled._chosen_for("sm_90"), recorded() as launches:
        _module("attention").attention(q, q, v, is_causal=True)
    (launch,) = launches
    assert ("wgmma" in compiled_for(launch, "sm_90").asm["ptx"]) == asynchronous


def _call(
    queries: int, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **arguments: Any
) -> str:
    """Name the kernel that a call on Hopper launches."""
    q = torch.zeros(2, queries, 4, head_dim, dtype=dtype)
    k = torch.zeros(2, 300, 2, head_dim, dtype=dtype)
    return _launched(q, k, k, **arguments)


def _launched(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> str:
    with attention_compiled._chosen_for("sm_90"), recorded() as launches:
        _module("attention").attention(q, k, v, **arguments)
    (launch,) = launches
    return launch.name


def test_long_queries_on_hopper_have_a_kernel_of_their_own() -> None:
    assert _call(300) == "_attend_long"
    assert _call(300, dtype=torch.float16, is_causal=True, window_left=3) == "_attend_long"
    assert _call(300, head_dim=80, logits_soft_cap=5.0) == "_attend_long"
    assert _call(3) == "attend"
    assert _call(300, dtype=torch.float32) == "attend"
    assert _call(300, head_dim=100) == "attend"  # rows don't start at multiples of 16 bytes
    assert _call(300, head_dim=32) == "attend"


def test_strides_do_not_choose_the_kernel() -> None:
    q = torch.zeros(2, 300, 4, 128, dtype=torch.bfloat16)
    k = torch.zeros(2, 300, 2, 128, dtype=torch.bfloat16)
    assert _launched(q, k, k) == "_attend_long"
    assert _launched(q, k[:, :, :1].expand(2, 300, 2, 128), k) == "_attend_long"
    flat = torch.zeros(2 * 300 * 2 * 128 + 1, dtype=torch.bfloat16)
    assert _launched(q, flat[1:].view(k.shape), k) == "_attend_long"
    assert _launched(q, k, torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16)) == "attend"
    assert _launched(q, k.transpose(2, 3).contiguous().transpose(2, 3), k) == "_attend_long"


def test_heads_are_packed_where_queries_are_few() -> None:
    packing = _module("_attention").packing
    assert packing(1, 8) == 8
    assert packing(1, 1) == 1
    assert packing(1000, 8) == 1


def test_nothing_is_launched_where_there_is_nothing_to_attend() -> None:
    op = _module("attention_with_lse").attention_with_lse
    k = torch.zeros(2, 0, 2, 16)
    with recorded() as launches:
        out, lse = op(torch.ones(2, 5, 4, 16), k, k)
        op(torch.ones(0, 5, 4, 16), torch.ones(0, 3, 2, 16), torch.ones(0, 3, 2, 16))
        op(torch.ones(2, 0, 4, 16), torch.ones(2, 3, 2, 16), torch.ones(2, 3, 2, 16))
    assert launches == []
    assert torch.equal(out, torch.zeros(2, 5, 4, 16))
    assert torch.equal(lse, torch.full((2, 5, 4), -math.inf))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "scale", "reason"),
    [
        (torch.float64, 64, 64, None, "dtype torch.float64"),
        (torch.float16, 264, 264, None, "head_dim 264"),
        (torch.float16, 64, 512, None, "head_dim of values 512"),
        (torch.float16, 64, 64, 1e-35, "scale 1e-35"),
        (torch.float16, 64, 64, -1e35, "scale -1e+35"),
    ],
)
def test_refusals_name_value_and_limit(
    dtype: torch.dtype, head_dim: int, value_dim: int, scale: float | None, reason: str
) -> None:
    q = torch.zeros(1, 2, 2, head_dim, dtype=dtype)
    k, v = q[:, :, :1], torch.zeros(1, 2, 1, value_dim, dtype=dtype)
    answers = [
        _module("attention").supports_call(q, k, v, scale=scale),
        _module("attention_with_lse").supports(q, k, v, scale=scale),
    ]
    for answer in answers:
        assert answer.startswith(f"{reason} (supported: "), answer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [None, 0.0, -2.0, 2.0**-100])
def test_all_else_is_taken(dtype: torch.dtype, scale: float | None) -> None:
    q = torch.zeros(1, 2, 2, 256, dtype=dtype)
    assert _module("attention").supports_call(q, q, q[..., :1], scale=scale) is None


@pytest.mark.parametrize("platform", [Platform.cuda((9, 0)), Platform.rocm("gfx942")], ids=str)
@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_chosen_without_importing_a_kernel(op: str, platform: Platform) -> None:
    spec = torch_ops.select_kernel(op, "triton", platform=platform)
    assert spec.target == f"{BACKEND}.{op}:{op}"


def _layer_spec(**changes: Any) -> Any:
    layers = importlib.import_module("torch_ops.attention.prepared")
    fields = {
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125, "is_causal": True,
        "window_left": -1, "logits_soft_cap": 0.0,
    }  # fmt: skip
    return layers.AttentionSpec(**(fields | changes))


def test_layers_are_served_or_told_why_not() -> None:
    ours, cuda = _module("attention"), torch.device("cuda", 0)
    assert ours.supports(_layer_spec(), cuda, torch.bfloat16) is None
    assert ours.supports(_layer_spec(logits_soft_cap=30.0), cuda, torch.float32) is None
    assert "head_dim 512" in ours.supports(_layer_spec(head_dim=512), cuda, torch.float16)
    assert "torch.float64" in ours.supports(_layer_spec(), cuda, torch.float64)
    prepared = ours.prepare(_layer_spec(), cuda, torch.bfloat16)
    assert prepared.backend is AttentionBackend.TRITON
    assert prepared.graph_safe


def test_layers_run_with_what_they_were_built_with() -> None:
    spec = _layer_spec(window_left=9, logits_soft_cap=20.0, scale=0.5)
    run = _module("attention").prepare(spec, torch.device("cpu"), torch.float16).run
    q, k = torch.zeros(1, 3, 4, 64).half(), torch.zeros(1, 40, 2, 64).half()
    with recorded() as by_layer:
        run(q, k, k)
    with recorded() as by_call:
        _module("attention").attention(q, k, k, True, 0.5, 9, 20.0)
    assert by_layer[0].values[5:] == by_call[0].values[5:]
    assert by_layer[0].variant is by_call[0].variant


CASES = [
    (300, 128, 4, torch.bfloat16, {"is_causal": True}),
    (300, 64, 1, torch.float16, {"is_causal": True, "window_left": 100}),
    (257, 256, 2, torch.bfloat16, {}),
    (200, 80, 4, torch.bfloat16, {"is_causal": True, "logits_soft_cap": 20.0}),
    (200, 100, 2, torch.float16, {"is_causal": True}),
    (5, 128, 8, torch.bfloat16, {"is_causal": True, "window_left": 33}),
    (33, 192, 3, torch.float16, {}),
    (70, 96, 2, torch.float32, {"is_causal": True, "window_left": 33, "logits_soft_cap": 5.0}),
]


def _inputs(
    queries: int, keys: int, head_dim: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Give views of buffers whose gaps are NaN."""
    generator = torch.Generator().manual_seed(queries)
    found = []
    for length, heads in ((queries, 2 * group), (keys, 2), (keys, 2)):
        values = torch.randn(2, length, heads, head_dim, generator=generator).to(dtype)
        buffer = torch.full((2, length + 3, heads + 1, head_dim + 8), math.nan, dtype=dtype)
        buffer[:, :length, :heads, :head_dim] = values
        found.append(buffer.cuda()[:, :length, :heads, :head_dim])
    return found[0], found[1], found[2]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("queries", "head_dim", "group", "dtype", "arguments"), CASES)
@pytest.mark.parametrize("keys", [417, 60])
def test_right_and_repeatable(
    queries: int, head_dim: int, group: int, dtype: torch.dtype, arguments: Any, keys: int
) -> None:
    from torch_ops.declarations import catalogue
    from torch_ops.testing.compare import check_output
    from torch_ops.testing.proof import proof_of

    q, k, v = _inputs(queries, keys, head_dim, group, dtype)
    op = "attention_with_lse"
    full = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    exact = {"q": q.cpu(), "k": k.cpu(), "v": v.cpu(), **full, **arguments}
    outputs = getattr(torch_ops.ops, op)(q, k, v, **arguments, backend="triton")
    again = getattr(torch_ops.ops, op)(q, k, v, **arguments, backend="triton")
    for got, rerun, want in zip(
        outputs, again, proof_of(op).oracle(exact, catalogue()[op].contract), strict=True
    ):
        assert torch.equal(got, rerun)
        check_output(got, want)
    alone = torch_ops.ops.attention(q, k, v, **arguments, backend="triton")
    assert torch.equal(alone, outputs[0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("keys", [4, 17, 18, 21, 31, 33])
def test_values_of_odd_width_come_from_their_own_rows(keys: int) -> None:
    """With the identity for values the output is P, zero where a query doesn't see a key."""
    hidden = torch.ones(keys, keys, device="cuda").triu(1).bool()
    for seed in range(50):
        torch.manual_seed(seed)
        q = torch.randn(1, keys, 8, 64, device="cuda").half()
        k = torch.randn(1, keys, 1, 64, device="cuda").half()
        eye = torch.eye(keys, device="cuda").half().view(1, keys, 1, keys)
        out = torch_ops.ops.attention(q, k, eye, is_causal=True, backend="triton")
        p = out[0].transpose(0, 1)
        assert not p[:, hidden].any()
        sums = p.float().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=5e-3, rtol=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("queries", [3, 130])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_offsets_past_32_bits(queries: int, which: str) -> None:
    step = 2**31 // 100 // 64 * 64  # the last of 130 rows starts past 2**31 elements
    small = {n: torch.randn(1, 130, 2, 64, device="cuda").bfloat16() for n in "qkv"}
    small["q"] = small["q"][:, -queries:]
    rows = small[which].shape[1]
    lead = 130 - rows
    buffer = torch.empty(step * 130, dtype=torch.bfloat16, device="cuda")
    view = buffer.as_strided((1, rows, 2, 64), (0, step, 64, 1), lead * step)
    view.copy_(small[which])
    arguments = {"is_causal": True, "backend": "triton"}
    expected = torch_ops.ops.attention_with_lse(*small.values(), **arguments)
    got = torch_ops.ops.attention_with_lse(*(small | {which: view}).values(), **arguments)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("queries", [4, 256])
def test_replayed_from_a_graph(queries: int) -> None:
    q, k, v = (t.contiguous() for t in _inputs(queries, 300, 64, 4, torch.float16))
    run = torch_ops.get_kernel("attention", "triton")
    expected = run(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, k, v, True)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)
    q.mul_(2)
    graph.replay()
    assert torch.equal(out, run(q, k, v, True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("queries", [4, 256])
def test_compiling_in_a_capture_is_refused(queries: int) -> None:
    q, k, v = (t.contiguous() for t in _inputs(queries, 300, 64, 4, torch.float16))
    for name in ("_attention", "_attention_hopper"):
        _module(name)._variant.cache_clear()
    _module("_attention")._plan.cache_clear()
    run = torch_ops.get_kernel("attention", "triton")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.add(q, 1)  # an empty graph is warned of
            run(q, k, v)

    with pytest.raises(torch_ops.CaptureError, match="prepare first"):
        capture()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("queries", [4, 256])
def test_tensors_on_another_device_than_the_current(queries: int) -> None:
    inputs = _inputs(queries, 300, 64, 4, torch.float16)
    run = torch_ops.get_kernel("attention", "triton")
    expected = run(*inputs)
    for _ in range(2):
        found = run(*(t.to("cuda:1") for t in inputs))
        assert found.device == torch.device("cuda", 1)
        assert torch.equal(found.cpu(), expected.cpu())
