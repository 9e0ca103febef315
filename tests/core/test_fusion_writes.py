"""The pair of apply_rope and append_paged_kv_: one op in its place writes over the queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import fusion, ops
from torch_ops.attention import Attention, AttentionMetadata

from .test_fusion import called, compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "opaque", "one_thread")
PASS = "apply_rope_append_paged_kv_"
WEIGHT, ANGLES = torch.randn(64, 128) / 8, torch.randn(9, 32)
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def parts(x: Tensor) -> Parts:
    """Heads of one product: two of queries, one of keys, one of values."""
    packed = x @ WEIGHT
    q, k, v = (part.unflatten(1, (-1, 32)) for part in packed.split([64, 32, 32], 1))
    return packed, q, k, v


def same(found: Any, expected: Any) -> None:
    assert all(map(torch.equal, found, expected))


def step(x: Tensor, pages: Tensor, values: Tensor | None = None, **how: Any) -> Any:
    """As in a layer of a decoder: what follows takes queries of any strides."""
    _, q, k, v = parts(x)
    places = torch.arange(x.shape[0])
    q, k = ops.apply_rope(q, k, ANGLES, places, **how)
    caches = (pages[0], pages[1]) if values is None else (pages, values)
    ops.append_paged_kv_(k, v, *caches, torch.where(places < 6, places, -1), **how)
    return (ops.rms_norm(q),)


def inputs(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64), torch.randn(2, 3, 4, 1, 32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_bits_are_those_of_two_calls(backend: str) -> None:
    torch._dynamo.reset()
    call: Any = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        x, pages = inputs(rows)
        kept = pages.clone()
        apart = [part.clone() for part in pages]
        with fusion.record() as seen, torch_ops.trace() as traced:
            found = call(x, *apart)
        same(found, step(x, kept))
        assert torch.equal(torch.stack(apart), kept)
        assert PASS in [record.op for record in traced.records]
        assert all(pair.fused for pair in seen)


def test_one_call_stands_where_the_second_was() -> None:
    call, counter = compiled(step)
    call(*inputs())
    assert called(counter) == [f"{PASS}.default", "rms_norm.default"]
    call, counter = compiled(lambda *args: step(*args, backend="torch"))
    call(*inputs())
    assert called(counter)[0] == f"{PASS}.backend"


def test_attention_layers_take_what_was_written_over() -> None:
    layer = Attention(2, 32, 1, is_causal=True)
    metadata = AttentionMetadata.paged(
        [1] * 3, [1, 3, 2], [[0], [1], [2]], page_size=4, num_pages=3, device="cpu"
    )

    def decode(x: Tensor, keys: Tensor, values: Tensor) -> Any:
        _, q, k, v = parts(x)
        q, k = ops.apply_rope(q, k, ANGLES, torch.tensor([0, 2, 1]))
        ops.append_paged_kv_(k, v, keys, values, torch.tensor([0, 6, 9]))
        return (layer(q, keys, values, metadata),)

    call, counter = compiled(decode)
    x, pages = inputs(3)
    kept, apart = pages.clone(), [part.clone() for part in pages]
    same(call(x, *apart), decode(x, *kept))
    assert torch.equal(torch.stack(apart), kept)
    assert called(counter)[0] == f"{PASS}.default"


def test_the_pass_can_be_switched_off() -> None:
    call, counter = compiled(step)
    undo = fusion.disable(PASS)
    try:
        with fusion.record() as seen:
            call(*inputs())
    finally:
        undo()
    assert [pair.reason for pair in seen] == ["switched off by fusion.disable"]
    assert called(counter)[:2] == ["apply_rope.default", "append_paged_kv_.default"]


def _append(k: Tensor, v: Tensor, pages: Tensor) -> None:
    ops.append_paged_kv_(k, v, pages[0], pages[1], torch.arange(5))


def _argument(x: Tensor, pages: Tensor) -> Any:
    _, _, k, v = parts(x)
    q, k = ops.apply_rope(x.view(5, 2, 32), k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return (ops.rms_norm(q),)


def _windows(x: Tensor, pages: Tensor) -> Any:
    packed, _, k, v = parts(x)
    q, k = ops.apply_rope(packed[:, :48].unfold(1, 32, 16), k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return (ops.rms_norm(q),)


def _read_later(x: Tensor, pages: Tensor) -> Any:
    packed, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return ops.rms_norm(q), packed.amax()


def _seen_later(x: Tensor, pages: Tensor) -> Any:
    packed, q, k, v = parts(x)
    view = packed.t()
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return ops.rms_norm(q), view


def _used_early(x: Tensor, pages: Tensor) -> Any:
    _, q, k, v = parts(x)
    slots, caches = torch.arange(5), (pages[0] * 1, pages[1] * 1)
    v = v * 1
    q, k = ops.apply_rope(q, k, ANGLES, slots)
    normed = ops.rms_norm(q)
    ops.append_paged_kv_(k, v, *caches, slots)
    return normed, ops.rms_norm(q)


def _pages_read_early(x: Tensor, pages: Tensor) -> Any:
    """Fused where the append was: what reads the pages before it does so still."""
    _, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    before = pages * 1
    _append(k, v, pages)
    return ops.rms_norm(q), before


def _keys_used(x: Tensor, pages: Tensor) -> Any:
    _, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return ops.rms_norm(q), ops.rms_norm(k)


def _viewed(x: Tensor, pages: Tensor) -> Any:
    _, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    _append(k, v, pages)
    return (q.view(5, 64),)


def _written(x: Tensor, pages: Tensor) -> Any:
    packed, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    packed.zero_()
    _append(k, v, pages)
    return (ops.rms_norm(q),)


def _pages_of_queries(x: Tensor, pages: Tensor) -> Any:
    packed, q, k, v = parts(x)
    q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
    caches = (packed[:4, None, None, 32 * i : 32 * (i + 1)] for i in (0, 3))
    ops.append_paged_kv_(k, v.clone(), *caches, torch.tensor([1, 0, -1, -1, -1]))
    return (ops.rms_norm(q),)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_argument, "would be written over, and l_x_ is its caller's"),
        (_windows, "would be written over, and its elements may share memory"),
        (_read_later, "would be written over, and amax reads its memory later"),
        (_seen_later, "would be written over, and output reads its memory later"),
        (_used_early, "normed takes what apply_rope_default gives before append_paged"),
        (_keys_used, "takes what lies between, too"),
        (_viewed, "view isn't known to take what isn't contiguous"),
        (_written, "zero_ writes between the two"),
        (
            _pages_of_queries,
            f"op '{PASS}': argument 'q' is at offset 0 of the",
        ),
    ],
)
def test_what_is_not_fused_and_why(function: Callable[..., Any], reason: str) -> None:
    call, counter = compiled(function)
    x, pages = inputs()
    kept = pages.clone()
    with fusion.record() as seen:
        found = call(x, pages)
    same(found, function(x, kept))
    assert torch.equal(pages, kept)
    (pair,) = seen
    assert not pair.fused
    assert reason in pair.reason
    assert f"{PASS}.default" not in called(counter)


def _exp(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ weight).exp()
    return h, h.sum()


def _square(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ weight
    return h, (h * h).sum()


def _scaled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, (h * weight.sum()).sum()


@pytest.mark.parametrize("loss", [_exp, _square, _scaled])
def test_what_a_backward_may_need_is_not_written_over(loss: Any) -> None:
    def step(x: Tensor, weight: Tensor, rows: Tensor, pages: Tensor) -> Any:
        h, total = loss(x, weight)
        k, v = rows.unflatten(1, (2, 1, 32)).unbind(1)
        q, k = ops.apply_rope(h.detach().unflatten(1, (2, 32)), k, ANGLES, torch.arange(5))
        _append(k, v, pages)
        return total, ops.rms_norm(q)

    (x, pages), rows = inputs(), torch.randn(5, 64)
    weights = [WEIGHT[:, :64].clone() for _ in range(2)]
    call, _ = compiled(step)
    with fusion.record() as seen:
        for function, weight in zip((step, call), weights, strict=True):
            function(x, weight.requires_grad_(), rows, pages.clone())[0].backward()
    torch.testing.assert_close(weights[1].grad, weights[0].grad)
    (pair,) = seen
    assert "may need it backward" in pair.reason


def test_dropout_may_give_what_it_takes() -> None:
    """Its fake copies: nothing tells that what it gives is the caller's."""

    def step(x: Tensor, rows: Tensor, pages: Tensor) -> Any:
        q = torch.nn.functional.dropout(x, 0.5, training=False).unflatten(1, (2, 32))
        k, v = rows.unflatten(1, (2, 1, 32)).unbind(1)
        q, k = ops.apply_rope(q, k, ANGLES, torch.arange(5))
        _append(k, v, pages)
        return (ops.rms_norm(q),)

    (x, pages), rows = inputs(), torch.randn(5, 64)
    kept = x.clone()
    call: Any = torch.compile(step, backend="eager", fullgraph=True)
    with fusion.record() as seen:
        found = call(x, rows, pages.clone())
    assert torch.equal(x, kept)
    same(found, step(x, rows, pages))
    (pair,) = seen
    assert "dropout may give what it takes" in pair.reason


def test_pages_that_are_read_before_are_the_old_ones() -> None:
    call, counter = compiled(_pages_read_early)
    x, pages = inputs()
    kept = pages.clone()
    same(call(x, pages), _pages_read_early(x, kept))
    assert torch.equal(pages, kept)
    assert f"{PASS}.default" in called(counter)


def test_places_that_vary_are_not_written() -> None:
    """Inductor would write at another place of the product; keys and values come first in it."""

    def rows(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
        k, v, q = torch.stack([x, x + 1, x * 2]).unflatten(2, (2, 32)).unbind(0)
        q, k = ops.apply_rope(q, k, ANGLES, torch.arange(x.shape[0]))
        ops.append_paged_kv_(k, v, k_cache, v_cache, torch.arange(x.shape[0]))
        return (ops.rms_norm(q),)

    call: Any = torch.compile(rows, fullgraph=True, dynamic=True)
    x, pages = torch.randn(5, 64), torch.randn(2, 3, 4, 2, 32)
    found, kept = [part.clone() for part in pages], pages.clone()
    with fusion.record() as seen:
        same(call(x, *found), rows(x, *kept))
    assert torch.equal(torch.stack(found), kept)
    reason = "q would be written over, at an offset that varies with sizes"
    assert {pair.reason for pair in seen} == {reason}


def test_what_dissolves_stays_apart() -> None:
    """A call that writes is no part of what PyTorch's compiler fuses."""
    undo = torch_ops.set_inline("auto")
    try:
        call, _ = compiled(step)
        with fusion.record() as seen:
            call(*inputs())
    finally:
        undo()
    assert [pair.reason for pair in seen] == [
        "apply_rope dissolves, and what writes stays one call"
    ]
