"""Ragged and paged calls of layers: values, plans, graphs, refusals."""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_ops
from torch_ops import once
from torch_ops.attention import (
    Attention,
    AttentionMetadata,
    attention_state,
    override_attention_backend,
)

from . import support
from .conftest import Install

PAGE, POOL = 4, 12
ATTENTION = """
import torch
from torch_ops.attention import AttentionBackend, PreparedAttention

class Planning(PreparedAttention):
    backend = AttentionBackend("acme")
    log = []

    def __init__(self, spec):
        self.spec = spec

    @property
    def plan_key(self):
        return ("acme", self.spec)

    def plan(self, metadata, state):
        if state is None:
            state = torch.zeros(len(metadata.kv_lens))
            state_of = "new"
        else:
            state_of = "kept"
        state.copy_(torch.tensor(metadata.kv_lens))
        self.log.append((state_of, metadata.kind, metadata.kv_lens))
        return state

    def run_paged(self, q, k, v, tables, plan):
        if not tables.decodes:
            return torch.zeros_like(q)
        return plan.to(q.dtype).view(-1, 1, 1).expand(q.shape).contiguous()

def supports(spec, device, dtype):
    return "dense calls (supported: paged)"

def supports_paged(spec, device, dtype):
    return None

def prepare(spec, device, dtype):
    return Planning(spec)
"""
PLANNING = {"__init__.py": "def available():\n    return None\n", "attention.py": ATTENTION}


class Planned(nn.Module):
    """Layers one after another, on one metadata."""

    def __init__(self, *layers: Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        for layer in self.layers:
            q = layer(q, k, v, metadata) * 2
        return q


def packed(layer: Attention, query_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Tensor]:
    spec = layer.spec
    rows = (sum(query_lens), sum(kv_lens), sum(kv_lens))
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(n, h, spec.head_dim) for n, h in zip(rows, heads, strict=True)]


def caches(layer: Attention) -> tuple[Tensor, Tensor]:
    """Caches of NaN, but for what `fill` writes."""
    shape = (POOL, PAGE, layer.spec.num_kv_heads, layer.spec.head_dim)
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


def fill(cache: Tensor, rows: Tensor, kv_lens: Sequence[int], pages: list[list[int]]) -> None:
    for own, part in zip(pages, rows.split(list(kv_lens)), strict=True):
        for place, row in enumerate(part):
            cache[own[place // PAGE], place % PAGE] = row


def pages_for(kv_lens: Sequence[int]) -> list[list[int]]:
    """Pages from the pool's end, interleaved over sequences."""
    free = iter(range(POOL - 1, -1, -1))
    return [[next(free) for _ in range(-(-length // PAGE))] for length in kv_lens]


def judge(
    layer: Attention, out: Tensor, parts: list[Tensor], lens: tuple[Sequence[int], Sequence[int]]
) -> None:
    """Compare each sequence with the exact result of a dense call."""
    q, k, v = parts
    splits = (out.split(list(lens[0])), q.split(list(lens[0])), k.split(list(lens[1])))
    for mine, own_q, own_k, own_v in zip(*splits, v.split(list(lens[1])), strict=True):
        if not own_k.shape[0]:
            assert mine.eq(0).all()
            continue
        dense = (own_q[None], own_k[None], own_v[None])
        assert support.worst(mine[None], layer.spec, *dense) <= 1


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(4, 8, 2, is_causal=True)


LENGTHS = [((1, 5), (3, 6)), ((0, 2, 3), (4, 2, 9)), ((2, 1), (0, 7)), ((4,), (2,))]


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_ragged_calls_are_dense_calls_of_each_sequence(
    lens: tuple[tuple[int, ...], tuple[int, ...]], window: int, cap: float
) -> None:
    layer = Attention(4, 8, 2, is_causal=True, window_left=window, logits_soft_cap=cap)
    parts = packed(layer, *lens)
    metadata = AttentionMetadata.ragged(*lens, device="cpu")
    judge(layer, layer(*parts, metadata), parts, lens)


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_paged_calls_read_their_pages_alone(
    lens: tuple[tuple[int, ...], tuple[int, ...]], causal: bool
) -> None:
    layer = Attention(4, 8, 2, is_causal=causal)
    q, k, v = parts = packed(layer, *lens)
    pages, (k_cache, v_cache) = pages_for(lens[1]), caches(layer)
    fill(k_cache, k, lens[1], pages)
    fill(v_cache, v, lens[1], pages)
    metadata = AttentionMetadata.paged(*lens, pages, page_size=PAGE, num_pages=POOL, device="cpu")
    assert not metadata.tables.decodes
    judge(layer, layer(q, k_cache, v_cache, metadata), parts, lens)


def step(kv_lens: Sequence[int], **more: Any) -> AttentionMetadata:
    """A decode step."""
    return AttentionMetadata.paged(
        [1] * len(kv_lens),
        kv_lens,
        pages_for(kv_lens),
        page_size=PAGE,
        num_pages=POOL,
        device="cpu",
        **more,
    )


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_step_after_step(layer: Attention) -> None:
    model = Planned(layer, Attention(4, 8, 2, is_causal=True))
    metadata = step([1, 1, 1], max_kv_len=POOL * PAGE, max_pages=POOL)
    assert metadata.tables.decodes
    addresses = [table.data_ptr() for table in metadata.tables[:4]]  # type: ignore[union-attr]
    k_cache, v_cache = (torch.randn_like(cache) for cache in caches(layer))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    q = torch.randn(3, 4, 8)
    seen = []
    for kv_lens in ([3, 6, 1], [4, 9, 2], [9, 9, 9], [5, 8]):
        metadata.plan([1] * len(kv_lens), kv_lens, pages_for(kv_lens))
        for target in ("torch_math", None):
            override_attention_backend(model, target)
            out = compiled(q, k_cache, v_cache, metadata)
            assert torch.equal(out, model(q, k_cache, v_cache, metadata))
        seen.append(out)
    assert counter.frame_count == 1
    assert [t.data_ptr() for t in metadata.tables[:4]] == addresses  # type: ignore[union-attr]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert seen[-1][2].eq(0).all(), "a row without a sequence is zeros"


def test_plans_are_made_once_for_layers_alike_and_follow_each_step(install: Install) -> None:
    install("acme", PLANNING)
    layers = [Attention(4, 8, 2), Attention(4, 8, 2), Attention(4, 8, 2, scale=1.0)]
    model, metadata = Planned(*layers), step([3, 6], max_kv_len=9)
    k_cache, v_cache = caches(layers[0])
    q = torch.randn(2, 4, 8)
    with torch_ops.use_backend("torch"):
        model(q, torch.zeros_like(k_cache), torch.zeros_like(v_cache), metadata)
    override_attention_backend(model, "acme")
    log = layers[0]._cache.get(layers[0].backend, layers[0]._place()).log  # type: ignore[union-attr]
    log.clear()
    assert model(q, k_cache, v_cache, metadata)[:, 0, 0].tolist() == [6.0, 12.0]
    assert log == [("new", "paged", (3, 6))] * 2, "layers with one scale share a plan"
    metadata.plan([1, 1], [4, 7], [[0], [1, 2]])
    assert log[2:] == [("kept", "paged", (4, 7))] * 2
    assert model(q, k_cache, v_cache, metadata)[:, 0, 0].tolist() == [8.0, 14.0]
    assert len(log) == 4


def test_backends_that_plan_nothing_are_not_kept(layer: Attention) -> None:
    metadata = AttentionMetadata.ragged([2], [3], device="cpu")
    layer(*packed(layer, [2], [3]), metadata)
    assert not metadata._plans


def test_a_plan_that_fails_leaves_everything_as_it_was(install: Install) -> None:
    install("acme", PLANNING)
    layer, metadata = Attention(4, 8, 2, backend="acme"), step([3, 6], max_kv_len=9)
    q, (k_cache, v_cache) = torch.randn(2, 4, 8), caches(layer)
    layer(q, k_cache, v_cache, metadata)
    acme = layer._cache.get(layer.backend, layer._place())
    assert acme is not None
    before, plan = metadata._buffer.clone(), type(acme).plan

    def failing(self: Any, given: AttentionMetadata, state: Tensor | None) -> Any:
        if given.kv_lens == (4, 7):
            raise MemoryError("no room")
        return plan(self, given, state)

    type(acme).plan = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError, match="no room"):
        metadata.plan([1, 1], [4, 7], [[0], [1, 2]])
    assert torch.equal(metadata._buffer, before)
    assert metadata.kv_lens == (3, 6)
    assert layer(q, k_cache, v_cache, metadata)[:, 0, 0].tolist() == [3.0, 6.0]


def test_an_override_whose_plan_fails_moves_nothing(install: Install) -> None:
    first = "        if state is None:"
    raising = ATTENTION.replace(first, f"        raise MemoryError('room')\n{first}")
    install("acme", {**PLANNING, "attention.py": raising})
    model = Planned(Attention(4, 8, 2), Attention(4, 8, 2))
    q, pool = torch.randn(2, 4, 8), torch.randn(POOL, PAGE, 2, 8)
    model(q, pool, pool, step([3, 6]))
    state = attention_state(model)
    with pytest.raises(torch_ops.AttentionOverrideError, match="MemoryError: room") as error:
        override_attention_backend(model, "acme")
    assert set(error.value.refused) == {"layers.0", "layers.1"}
    assert attention_state(model) == state


def test_nothing_is_planned_in_a_capture(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", PLANNING)
    layer = Attention(4, 8, 2, backend="acme")
    first, second = step([3, 6]), step([3, 6])
    q, (k_cache, v_cache) = torch.randn(2, 4, 8), caches(layer)
    layer(q, k_cache, v_cache, first)
    monkeypatch.setattr(once, "capturing", lambda: True)
    layer(q, k_cache, v_cache, first)
    with pytest.raises(torch_ops.CaptureError, match=r"no plan for this metadata.*prepare first"):
        layer(q, k_cache, v_cache, second)
    with pytest.raises(torch_ops.CaptureError, match=r"plan is refused while a stream"):
        first.plan([1, 1], [4, 7], [[0], [1, 2]])
    assert first.kv_lens == (3, 6)


def test_an_override_serves_every_kind_of_call_that_was_seen(layer: Attention) -> None:
    q, k, v = packed(layer, [2], [3])
    layer(q[None], k[None], v[None])
    override_attention_backend(layer, "torch_flash").undo()
    layer(q, k, v, AttentionMetadata.ragged([2], [3], device="cpu"))
    state = attention_state(layer)
    with pytest.raises(torch_ops.AttentionOverrideError, match="ragged and paged calls"):
        override_attention_backend(layer, "torch_flash")
    assert attention_state(layer) == state
    with torch_ops.trace() as seen:
        layer(q, k, v, AttentionMetadata.ragged([2], [3], device="cpu"))
    (record,) = seen.records
    assert record.backend == "torch_math"
    assert any("ragged" in reason for _, reason in record.skipped)


BAD_PLANS = [
    (([1, 1], [3, 6, 1], None), "argument 'kv_lens' is of 3 sequences"),
    (([2, 1], [3, 6], [[0], [1, 2]]), r"argument 'query_lens' is \[2, 1\].*lengths from 0 to 1"),
    (([1, 1], [3, -6], [[0], [1, 2]]), "argument 'kv_lens' is .*lengths from 0 to 9"),
    (([1, 1], [3, 6], [[0], [1]]), r"pages\[1\]' is of 1 pages \(accepted: 2 pages of 4 tokens"),
    (([1, 1], [3, 6], [[0], [1, 12]]), "with page 12 .*pages 0 to 11"),
    (([1, 1], [3, 6], [[0], [1, -1]]), "with page -1"),
    (([1, 1], [3, 6], [[0]]), "argument 'pages' is of 1 sequences"),
    (([1, 1], [9, 9], [[0, 1, 2], [3, 4, 5]]), "of 6 pages .*at most 4"),
    (([1, 1], [3, 6], None), "argument 'pages' is None .*lists of pages"),
    (([1, 1], [3], [[0]]), "argument 'kv_lens' is of 1 sequences .*2, as query_lens"),
    (([1, 1], [3, 6], [[0], [1, 2**40]]), rf"pages\[1\]' is \[1, {2**40}\] .*pages 0 to 11"),
]


@pytest.mark.parametrize(("numbers", "text"), BAD_PLANS, ids=[text for _, text in BAD_PLANS])
def test_a_bad_plan_is_refused_and_changes_nothing(numbers: Any, text: str) -> None:
    metadata = step([9, 1])
    before = metadata._buffer.clone()
    with pytest.raises(ValueError, match=text):
        metadata.plan(*numbers)
    assert torch.equal(metadata._buffer, before)
    assert metadata.kv_lens == (9, 1)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            {"query_lens": [-1]},
            ValueError,
            r"'query_lens' is \[-1\] .*lengths from 0 to 0",
        ),
        ({"kv_lens": [-3]}, ValueError, r"'kv_lens' is \[-3\] \(accepted: lengths from 0 to 0"),
        ({"kv_lens": [2.5]}, TypeError, r"'kv_lens' is \[2.5\] \(accepted: whole numbers\)"),
        ({"max_query_len": -5}, ValueError, r"'max_query_len' is -5 \(accepted: an int from 0 to"),
        ({"max_kv_len": 1.5}, TypeError, r"'max_kv_len' is 1.5 \(accepted: an int\)"),
        ({"max_pages": -3}, ValueError, r"'max_pages' is -3 \(accepted: an int from 0 to"),
        ({"num_pages": "x"}, TypeError, r"'num_pages' is 'x' \(accepted: an int\)"),
        ({"page_size": 0}, ValueError, r"'page_size' is 0 \(accepted: an int from 1 to"),
    ],
)
def test_bad_numbers_make_no_metadata(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    right: dict[str, Any] = {"query_lens": [1], "kv_lens": [3], "page_size": 4, "num_pages": 12}
    with pytest.raises(kind, match=text):
        AttentionMetadata.paged(pages=[[0]], device="cpu", **{**right, **given})


def test_lengths_are_whole_numbers() -> None:
    metadata = step([9, 1])
    with pytest.raises(TypeError, match=r"'kv_lens' is \[3.5, 6\] \(accepted: whole numbers\)"):
        metadata.plan([1, 1], [3.5, 6], [[0], [1, 2]])  # type: ignore[list-item]
    assert metadata.kv_lens == (9, 1)


@pytest.mark.parametrize("pages", [[[0], [1, 2.0]], [[0], 5], 5], ids=str)
def test_pages_are_lists_of_whole_numbers(pages: Any) -> None:
    metadata = step([9, 1])
    with pytest.raises(
        TypeError, match=r"argument 'pages(\[1\])?' is .*\(accepted: (lists of )?pages"
    ):
        metadata.plan([1, 1], [3, 6], pages)
    assert metadata.kv_lens == (9, 1)


def test_lengths_and_pages_may_be_arrays_and_tensors(layer: Attention) -> None:
    made = AttentionMetadata.paged(
        torch.tensor([1, 1]),  # type: ignore[arg-type]
        array("q", [3, 4]),
        torch.tensor([[7], [2]]),  # type: ignore[arg-type]
        page_size=torch.tensor(PAGE),  # type: ignore[arg-type]
        num_pages=torch.tensor(POOL),  # type: ignore[arg-type]
        device="cpu",
    )
    assert (made.query_lens, made.kv_lens, made.pool) == ((1, 1), (3, 4), (POOL, PAGE))
    assert [type(most) for most in made.tables[4:]] == [int, int]
    assert made._buffer.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 7, 2]


@pytest.mark.parametrize(
    ("numbers", "kind", "text"),
    [
        ({"page_size": 0}, ValueError, "'page_size' is 0 .*from 1 to"),
        ({"page_size": None}, TypeError, "'page_size' is None .*an int"),
        ({"page_size": 2.5}, TypeError, "'page_size' is 2.5 .*an int"),
        ({"num_pages": -1}, ValueError, "'num_pages' is -1 .*from 0 to"),
        ({"max_query_len": -1}, ValueError, "'max_query_len' is -1 .*from 0 to"),
        ({"max_kv_len": 2**31}, ValueError, "'max_kv_len' is 2147483648 .*to 2147483647"),
        ({"max_query_len": 2**23, "max_kv_len": 2**23}, ValueError, "'max_kv_len' is .*at most"),
        ({"max_pages": -1}, ValueError, "'max_pages' is -1 .*from 0 to"),
        ({"query_lens": 5}, TypeError, "'query_lens' is 5 .*whole numbers"),
        ({"kv_lens": [2, -1]}, ValueError, r"'kv_lens' is \[2, -1\] .*lengths from 0 to 2"),
    ],
    ids=str,
)
def test_numbers_of_metadata_are_checked(numbers: Any, kind: type[Exception], text: str) -> None:
    given = {"query_lens": [1, 1], "kv_lens": [3, 4], "pages": [[0], [1]], "page_size": PAGE}
    with pytest.raises(kind, match=text):
        AttentionMetadata.paged(**{**given, "num_pages": POOL, "device": "cpu", **numbers})


def test_rows_of_all_sequences_are_no_more_than_tables_can_tell() -> None:
    with pytest.raises(ValueError, match=r"'sum\(query_lens\)' is 2147483648 .*to 2147483647"):
        AttentionMetadata.ragged([2**30, 2**30], [1, 1], device="cpu")


@pytest.mark.parametrize("copied", [lambda m: m, deepcopy], ids=["made", "copied"])
def test_metadata_of_inference_mode_is_planned_outside_of_it(
    copied: Callable[[Any], Any], layer: Attention, install: Install
) -> None:
    install("acme", PLANNING)
    q, (k, v) = torch.randn(2, 4, 8), (torch.randn_like(cache) for cache in caches(layer))
    with torch.inference_mode(), torch_ops.use_backend(attention="acme"):
        metadata: AttentionMetadata = copied(step([3, 6]))
        assert torch.equal(layer(q, k, v, metadata)[:, 0, 0], torch.tensor([3.0, 6.0]))
    metadata.plan([1, 1], [4, 2], [[3], [8]])
    with torch_ops.use_backend(attention="acme"):
        assert torch.equal(layer(q, k, v, metadata)[:, 0, 0], torch.tensor([4.0, 2.0]))


def test_calls_that_do_not_fit_their_metadata_are_refused(layer: Attention) -> None:
    q, k, v = packed(layer, [2, 1], [3, 4])
    ragged = AttentionMetadata.ragged([2, 1], [3, 4], device="cpu")
    decode, (k_cache, v_cache) = step([3, 6]), caches(layer)
    for args, kind, text in (
        ((q[:2], k, v, ragged), ValueError, "'q' has 2 rows .*at least 3, as planned"),
        ((q, k[:5], v[:5], ragged), ValueError, "'k' has 5 rows .*at least 7, as planned"),
        ((q, k_cache, v_cache, decode), ValueError, "'q' is of 3 rows .*2, one for each sequence"),
        ((q[:2], k_cache[:5], v_cache[:5], decode), ValueError, r"\(5, 4\) \(accepted: \(12, 4\)"),
        ((q[:2], k, v, decode), ValueError, "argument 'k_cache' is of shape"),
        ((q[None], k, v, ragged), ValueError, "argument 'q' is of shape"),
        ((q, k.double(), v, ragged), TypeError, "argument 'k' is torch.float64"),
        ((q[:, :2], k, v, ragged), ValueError, "heads"),
        ((q, k, v, 3), TypeError, "argument 'metadata' is a int"),
    ):
        with pytest.raises(kind, match=text):
            layer(*args)


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_their_own_ways(copied: Callable[[Any], Any], layer: Attention) -> None:
    metadata = step([3, 6], max_kv_len=9)
    q, (k, v) = torch.randn(2, 4, 8), (torch.randn_like(cache) for cache in caches(layer))
    before = layer(q, k, v, metadata)
    other: AttentionMetadata = copied(metadata)
    assert torch.equal(layer(q, k, v, other), before)
    other.plan([1, 1], [4, 7], [[3], [8, 2]])
    assert not torch.equal(layer(q, k, v, other), before)
    assert torch.equal(layer(q, k, v, metadata), before)
    assert metadata.kv_lens == (3, 6)
    assert len({len(one._step) for one in (metadata, other)}) == 2


def test_metadata_that_is_gone_is_refused(layer: Attention) -> None:
    q, k, v = packed(layer, [2], [3])
    metadata = AttentionMetadata.ragged([2], [3], device="cpu")
    tables, named = metadata.tables, metadata._step
    del metadata
    with pytest.raises(torch_ops.NotPreparedError, match=f"no metadata has the id {len(named)}"):
        torch.ops.torch_ops._attention_layer_planned(
            q, k, v, *tables[:4], named, layer._slot, layer._group.route
        )


def test_opcheck_accepts_the_operator_of_planned_calls(layer: Attention) -> None:
    q, k, v = packed(layer, [2, 1], [3, 4])
    ragged, decode = AttentionMetadata.ragged([2, 1], [3, 4], device="cpu"), step([3, 6])
    caches_of_one = [torch.ones_like(cache) for cache in caches(layer)]
    packet = torch.ops.torch_ops._attention_layer_planned.default
    for metadata, args in ((ragged, (q, k, v)), (decode, (q[:2], *caches_of_one))):
        named = (metadata._step, layer._slot, layer._group.route)
        verdicts = torch.library.opcheck(packet, (*args, *metadata.tables[:4], *named))
        assert set(verdicts.values()) == {"SUCCESS"}, verdicts
