"""Triton's ragged and paged attention: interpreted, compiled for absent GPUs, and run on a GPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops

from . import append_interpreted, ragged_compiled, ragged_interpreted, workers
from .ragged_compiled import Call, launches
from .rows_compiled import BACKEND, recorded
from .rows_compiled import compiled as compiled_for

pytest.importorskip("triton", reason="triton is not installed")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)
CACHE = str(workers.ROOT / ".cache" / "triton")
PLAIN = Call(16, 4, 300, -1, 0.0, True)


def _module(name: str) -> Any:
    return importlib.import_module(f"{BACKEND}.{name}")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's processes found."""
    return workers.in_processes("ragged_interpreted", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def appended() -> dict[str, str | None]:
    """What the interpreter's processes found of the append."""
    return workers.in_processes("append_interpreted", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    return workers.in_processes("ragged_compiled", TRITON_CACHE_DIR=CACHE)


@pytest.mark.parametrize("check", ragged_interpreted.checks())
def test_interpreted(interpreted: dict[str, str | None], check: str) -> None:
    assert check in interpreted, f"not run; there are {len(interpreted)}"
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.parametrize("check", append_interpreted.checks())
def test_appends(appended: dict[str, str | None], check: str) -> None:
    assert check in appended, f"not run; there are {len(appended)}"
    assert appended[check] is None, appended[check]


@pytest.mark.parametrize("check", ragged_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_compiles_in_every_dtype_with_every_head_dim() -> None:
    workers.everything(ragged_compiled, TRITON_CACHE_DIR=CACHE)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_interpreted_in_every_dtype() -> None:
    flags = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    workers.everything(ragged_interpreted, **flags)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_keys_are_loaded_ahead(page: int) -> None:
    """Copies that aren't waited for at once: two steps of keys and of values are in flight."""
    call = PLAIN._replace(page=page)
    decode = launches("sm_90", "paged_decode", torch.bfloat16, 128, call)[0]
    made = compiled_for(decode, "sm_90")
    assert "ttg.async_wait" in made.asm["ttgir"]
    chosen = _module("_paged_decode").config("sm_90", 2, 128, 16)
    assert f"{chosen.stages - 1}x{chosen.block_n}x128xbf16" in made.asm["ttgir"]
    in_flight = [int(n) for n in _numbers(made.asm["ttgir"], "ttg.async_wait", "num = ")]
    assert max(in_flight) >= 3


def _numbers(text: str, operation: str, field: str) -> list[str]:
    lines = [line for line in text.splitlines() if operation in line and field in line]
    return [line.split(field)[1].split()[0].rstrip("}:,") for line in lines]


def test_the_page_table_has_one_plan_however_long_it_is() -> None:
    decode = _module("_paged_decode")
    with ragged_compiled.chosen_for("sm_90"):
        before = decode._plan.cache_info().misses
        q, cache = torch.zeros(4, 8, 64), torch.zeros(9, 16, 2, 64)
        bounds = torch.zeros(5, dtype=torch.int32)
        with recorded() as found:
            for listed in (1, 40, 4000):
                table = (bounds, torch.zeros(listed).int(), bounds[1:])
                _module("paged_decode").paged_decode(q, cache, cache, *table)
        assert decode._plan.cache_info().misses == before + 1
    assert [launch.name for launch in found] == ["decode"] + ["decode", "unite"] * 2


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # batch, listed, span, share, pieces, align -> share, pieces, slots
        ((4, 10, 0, 16, 132, 4), (16, 132, 4)),
        ((4, 160, 0, 16, 132, 4), (16, 132, 14)),
        ((128, 32768, 0, 16, 132, 4), (16, 132, 260)),
        ((4, 1000, 258, 16, 132, 4), (16, 17, 68)),
        ((200, 100000, 258, 16, 132, 4), (260, 1, 200)),
        ((1, 3, 258, 16, 132, 4), (16, 1, 1)),
    ],
)
def test_sequences_are_cut_by_shapes_alone(
    call: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert _module("_paged_decode").cut(*call) == expected


def _cache_and_table(
    lengths: tuple[int, ...], pages: int, step: int | None = None
) -> dict[str, Tensor]:
    """Make a cache of pages of 16 keys, 2 key heads and head_dim 64, and a table of random pages.

    Args:
        lengths: Keys of each sequence.
        pages: Of the cache.
        step: Elements from one page to the next, if not as few as can be.
    """
    torch.manual_seed(1)
    shape = (pages, 16, 2, 64)
    counts = [-(-n // 16) for n in lengths]
    found: dict[str, Tensor] = {}
    for name in ("k_cache", "v_cache"):
        if step is None:
            found[name] = torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")
        else:
            buffer = torch.empty(step * pages, dtype=torch.bfloat16, device="cuda")
            found[name] = buffer.as_strided(shape, (step, 128, 64, 1))
    ids = (pages - 1 - torch.randperm(min(pages, 2 * sum(counts)))[: sum(counts)]).int().cuda()
    for name in ("k_cache", "v_cache"):
        found[name][ids.long()] = torch.randn(len(ids), *shape[1:], device="cuda").bfloat16()
    bounds = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    last = torch.tensor([n - (c - 1) * 16 for n, c in zip(lengths, counts, strict=True)])
    return found | {
        "kv_indptr": bounds, "kv_indices": ids, "kv_last_page_len": last.int().cuda()
    }  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_offsets_past_32_bits(op: str) -> None:
    far = _cache_and_table((40, 17), 70, step=2**31 // 60 // 64 * 64)
    q = torch.randn(2, 8, 64, device="cuda").bfloat16()
    close = far | {name: far[name].contiguous() for name in ("k_cache", "v_cache")}
    got, expected = (_call(op, q, args) for args in (far, close))
    assert torch.equal(got, expected)
    wanted = getattr(torch_ops.ops, op)(*_arguments(op, q, close), backend="torch")
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def _arguments(op: str, q: Tensor, args: dict[str, Tensor]) -> tuple[Tensor, ...]:
    caches = (args["k_cache"], args["v_cache"])
    table = (args["kv_indptr"], args["kv_indices"], args["kv_last_page_len"])
    if op == "paged_decode":
        return (q, *caches, *table)
    bounds = torch.arange(len(args["kv_indptr"]), dtype=torch.int32, device=q.device)
    return (q, *caches, bounds, *table)


def _call(op: str, q: Tensor, args: dict[str, Tensor]) -> Tensor:
    found: Tensor = getattr(torch_ops.ops, op)(*_arguments(op, q, args), backend="triton")
    return found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_replayed_from_a_graph_with_other_lengths(op: str) -> None:
    """The launch is the same for all lengths: a graph reads them from the table."""
    args = _cache_and_table((3000, 700, 33), 400)
    q = torch.randn(3, 8, 64, device="cuda").bfloat16()
    given = _arguments(op, q, args)
    run = torch_ops.get_kernel(op, "triton")
    run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*given)
    for lengths in ((3000, 700, 33), (16, 700, 33), (2990, 1, 32)):
        counts = [-(-n // 16) for n in lengths]
        args["kv_indptr"].copy_(torch.tensor([0, *counts]).cumsum(0))
        last = [n - (c - 1) * 16 for n, c in zip(lengths, counts, strict=True)]
        args["kv_last_page_len"].copy_(torch.tensor(last))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, run(*given))
        wanted = getattr(torch_ops.ops, op)(*given, backend="torch")
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
def test_one_long_sequence_among_short_ones_is_cut() -> None:
    args = _cache_and_table((30_000, *(20,) * 40), 2000)
    q = torch.randn(41, 8, 64, device="cuda").bfloat16()
    wanted = torch_ops.ops.paged_decode(*_arguments("paged_decode", q, args), backend="torch")
    got = _call("paged_decode", q, args)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
def test_compiling_in_a_capture_is_refused() -> None:
    args = _cache_and_table((300,), 30)
    q = torch.randn(1, 8, 64, device="cuda").bfloat16()
    given = _arguments("paged_decode", q, args)
    for name in ("_plan", "_variants"):
        getattr(_module("_paged_decode"), name).cache_clear()
    run = torch_ops.get_kernel("paged_decode", "triton")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.add(q, 1)  # an empty graph is warned of
            run(*given)

    with pytest.raises(torch_ops.CaptureError, match="prepare first"):
        capture()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary", [128, 64])
def test_rotated_and_appended_at_once_as_by_two_kernels(
    tokens: int, is_neox: bool, rotary: int
) -> None:
    packed = torch.randn(tokens, 48, 128, device="cuda").bfloat16()
    q, k, v = packed.split([32, 8, 8], 1)
    caches = torch.randn(2, 50, 16, 8, 128, device="cuda").bfloat16()
    slots = torch.randperm(50 * 16, device="cuda")[:tokens]
    slots[1::7] = -1
    angles = torch.randn(900, rotary, device="cuda")
    positions = torch.randint(0, 900, (tokens,), device="cuda")
    ops = torch_ops.ops
    turned, keys = ops.apply_rope(q, k, angles, positions, is_neox, backend="triton")
    expected = caches.clone()
    ops.append_paged_kv_(keys, v, *expected, slots, backend="triton")
    rest = packed[:, 32:].clone()
    ops.apply_rope_append_paged_kv_(
        q, k, v, angles, positions, *caches, slots, is_neox, backend="triton"
    )
    assert torch.equal(q, turned)
    assert torch.equal(caches, expected)
    assert torch.equal(packed[:, 32:], rest)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", ["apart", "interleaved", "heads first"])
def test_appended_rows_are_where_their_slots_are(layout: str) -> None:
    shape = {"heads first": (2, 50, 8, 16, 128)}.get(layout, (2, 50, 16, 8, 128))
    pool = torch.randn(shape, device="cuda").bfloat16()
    if layout == "interleaved":
        pool = torch.randn(50, 2, 16, 8, 128, device="cuda").bfloat16().transpose(0, 1)
    k_cache, v_cache = pool.transpose(2, 3) if layout == "heads first" else pool
    k, v = torch.randn(2, 300, 8, 128, device="cuda").bfloat16()
    slots = torch.randperm(50 * 16, device="cuda")[:300]
    slots[::7] = -1
    expected = k_cache.clone(), v_cache.clone()
    torch_ops.ops.append_paged_kv_(k, v, *expected, slots, backend="torch")
    torch_ops.ops.append_paged_kv_(k, v, k_cache, v_cache, slots, backend="triton")
    for got, want in zip((k_cache, v_cache), expected, strict=True):
        assert torch.equal(got, want)
