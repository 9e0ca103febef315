"""Operators inside of code that Inductor generates: views, writes, dead code, and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torch_ops
from torch_ops import declare, ops, runtime
from torch_ops.contracts import Contract

WEIGHT = torch.linspace(0.5, 1.5, 8)
CACHE, POSITIONS = torch.randn(8, 16), torch.arange(3)
SLOTS = torch.tensor([2, 5, -1])
LATER = (SLOTS, SLOTS + 4)


@pytest.fixture(autouse=True)
def own_graphs(opaque: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(function: Callable[..., Any], *args: Tensor) -> str:
    """Check results and written arguments against eager code; gives the generated wrapper."""
    copies = [arg.clone() for arg in args]
    for copy, arg in zip(copies, args, strict=True):
        assert copy.stride() == arg.stride()
    expected = function(*args)
    found, sources = run_and_get_code(torch.compile(function, fullgraph=True), *copies)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(copies, list(args), rtol=0, atol=0)
    (source,) = sources
    body: str = source[source.index("def call(") : source.index("runner = ")]
    return body


def test_one_call_and_nothing_else() -> None:
    """The operator stays one node, at the cost of calling it."""
    body = compare(lambda x: torch.ops.torch_ops.rms_norm(x, WEIGHT), torch.randn(3, 8))
    assert body.count("torch.ops.torch_ops_compiled.rms_norm.default(") == 1
    assert "cpp_fused" not in body


def test_views_of_packed_projections_arrive_as_they_are() -> None:
    """Slices, splits, expanded and transposed inputs of the graph: the bits of eager code."""

    def model(qkv: Tensor, x: Tensor) -> Any:
        q, k, gate = qkv[..., :8], qkv[..., 8:16], qkv.split(8, -1)[2]
        return (
            ops.rms_norm(q, WEIGHT),
            ops.rms_norm(k.transpose(0, 1), WEIGHT),
            ops.silu_and_mul(gate),
            ops.gelu_and_mul(x[:1].expand(4, 8)),
            ops.layer_norm(x.t()),
        )

    body = compare(model, torch.randn(3, 2, 24), torch.randn(2, 8))
    assert "cpp_fused" not in body, "no copy is made for any of them"


def test_intermediate_results_of_odd_strides() -> None:
    """What Inductor makes itself goes in and comes out through more views."""

    def model(x: Tensor) -> Any:
        odd = (x * 2).t()[:, 1:7]
        normed = ops.rms_norm(odd)
        lifted = normed.t().unsqueeze(1) * 2
        return ops.silu_and_mul((lifted + 1).squeeze(1)[:, :4]), torch.pixel_shuffle(
            normed[:4, :4].reshape(1, 4, 2, 2).permute(0, 1, 3, 2), 2
        )

    compare(model, torch.randn(8, 6).repeat(1, 2)[:, :8].contiguous())


def _rotate_and_keep(qkv: Tensor, cache: Tensor) -> None:
    ops.apply_rope_(qkv[:, :4], qkv[:, 4:6], CACHE, POSITIONS)
    ops.append_paged_kv_(qkv[:, 4:6], qkv[:, 6:], cache[0], cache[1], SLOTS)


def _rotate_into_pages(qkv: Tensor, cache: Tensor) -> None:
    q, k, v = qkv.split([4, 2, 2], 1)
    ops.apply_rope_append_paged_kv_(q, k, v, CACHE, POSITIONS, cache[0], cache[1], SLOTS)


WRITES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "twice": (
        lambda x, r: [ops.fused_add_rms_norm_(x, r, WEIGHT) for _ in range(2)] and None,
        (3, 8),
        (3, 8),
    ),
    "two parts of one tensor": (
        lambda kv, x: ops.fused_add_rms_norm_(kv[0], kv[1], WEIGHT),
        (2, 3, 8),
        (3, 8),
    ),
    "unbound parts": (
        lambda kv, x: ops.fused_add_rms_norm_(kv.unbind(0)[0], x, WEIGHT),
        (2, 3, 8),
        (3, 8),
    ),
    "columns": (
        lambda qkv, x: ops.apply_rope_(qkv[:, :4], qkv[:, 4:6], CACHE, POSITIONS),
        (3, 8, 16),
        (1,),
    ),
    "split heads": (
        lambda qkv, x: ops.apply_rope_(*qkv.split([4, 2, 2], 1)[:2], CACHE, POSITIONS),
        (3, 8, 16),
        (1,),
    ),
    "rows": (lambda x, r: ops.fused_add_rms_norm_(x[1:3], r[:2], WEIGHT), (4, 8), (3, 8)),
    "one row each": (
        lambda x, r: [ops.fused_add_rms_norm_(x[i], r[i], WEIGHT) for i in range(3)] and None,
        (3, 8),
        (3, 8),
    ),
    "flattened": (
        lambda x, r: ops.fused_add_rms_norm_(x.view(-1, 8), r.view(-1, 8), WEIGHT),
        (2, 3, 8),
        (2, 3, 8),
    ),
    "chunks of columns": (
        lambda x, r: ops.fused_add_rms_norm_(*x.chunk(2, -1), WEIGHT),
        (3, 16),
        (1,),
    ),
    "transposed": (
        lambda x, r: ops.fused_add_rms_norm_(x.transpose(0, 1), r.transpose(0, 1), WEIGHT),
        (2, 3, 8),
        (2, 3, 8),
    ),
    "residual of two layers": (
        lambda x, r: [ops.fused_add_rms_norm_(part, r, WEIGHT) for part in x] and None,
        (2, 3, 8),
        (3, 8),
    ),
    "a cache": (
        lambda kv, c: ops.append_paged_kv_(kv[0], kv[1], c[0], c[1], SLOTS),
        (2, 3, 2, 8),
        (2, 4, 4, 2, 8),
    ),
    "two layers on one cache": (
        lambda kv, c: [ops.append_paged_kv_(kv[i], kv[i], *c, LATER[i]) for i in (0, 1)] and None,
        (2, 3, 2, 8),
        (2, 4, 4, 2, 8),
    ),
    "layers of one tensor of caches": (
        lambda kv, c: [ops.append_paged_kv_(*kv, *c[i].unbind(0), SLOTS) for i in (0, 1)] and None,
        (2, 3, 2, 8),
        (2, 2, 4, 4, 2, 8),
    ),
    "packed keys and values of a cache": (
        lambda kv, c: ops.append_paged_kv_(*kv, c[:, 0], c[:, 1], SLOTS),
        (2, 3, 2, 8),
        (4, 2, 4, 2, 8),
    ),
    "heads of packed projections": (
        lambda qkv, c: ops.append_paged_kv_(qkv[:, 4:6], qkv[:, 6:], c[0], c[1], SLOTS),
        (3, 8, 8),
        (2, 4, 4, 2, 8),
    ),
    "heads first in a cache": (
        lambda kv, c: ops.append_paged_kv_(*kv, *(x.transpose(1, 2) for x in c), SLOTS),
        (2, 3, 2, 8),
        (2, 4, 2, 4, 8),
    ),
    "rotated, then kept": (_rotate_and_keep, (3, 8, 16), (2, 4, 4, 2, 16)),
    "rotated and kept": (_rotate_into_pages, (3, 8, 16), (2, 4, 4, 2, 16)),
    "query and key of one tensor": (
        lambda qk, x: ops.apply_rope_(qk[0], qk[1], CACHE, POSITIONS),
        (2, 3, 4, 16),
        (1,),
    ),
    "rotated twice": (
        lambda q, k: (
            [ops.apply_rope_(q, k, CACHE, POSITIONS, flag) for flag in (True, False)] and None
        ),
        (3, 4, 16),
        (3, 2, 16),
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_go_to_the_arguments_themselves(name: str) -> None:
    """No clone before and no copy after, also through views of one tensor."""
    function, *shapes = WRITES[name]
    body = compare(function, *(torch.randn(shape) for shape in shapes))
    assert "cpp_fused" not in body
    assert "empty_strided" not in body
    assert "copy_" not in body


def test_queries_of_a_projection_are_written_where_they_are() -> None:
    """What is written is a part of what a product gave, as in a decoder's layer: no copy."""

    def model(x: Tensor, weight: Tensor, cache: Tensor) -> Any:
        q, k, v = (x @ weight).view(3, 8, 16).split([4, 2, 2], 1)
        ops.apply_rope_append_paged_kv_(q, k, v, CACHE, POSITIONS, cache[0], cache[1], SLOTS)
        return ops.rms_norm(q)

    body = compare(model, torch.randn(3, 8), torch.randn(8, 128), torch.randn(2, 4, 4, 2, 16))
    assert "cpp_fused" not in body
    assert "copy_" not in body


def test_what_is_read_after_a_write_is_new_and_before_it_old() -> None:
    def model(x: Tensor, residual: Tensor) -> Any:
        view = x.view(-1)
        before = view * 1
        ops.fused_add_rms_norm_(x, residual, WEIGHT)
        return before, view * 1, residual.t() * 1

    compare(model, torch.randn(3, 8), torch.randn(3, 8))


def test_a_written_intermediate_is_not_dead_code() -> None:
    def model(x: Tensor) -> Any:
        y, residual = x * 2, x + 1
        ops.fused_add_rms_norm_(y, residual, WEIGHT)
        return residual * 1

    body = compare(model, torch.randn(3, 8))
    assert body.count("fused_add_rms_norm_.default(") == 1


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["whole", "part"])
def test_a_clone_beside_a_written_argument(part: slice) -> None:
    """Inductor takes the clone for its source (pytorch#198031), if nothing is done about it."""

    def model(x: Tensor) -> Any:
        y = x[part].clone()
        ops.fused_add_rms_norm_(y.view(-1, 8), x[part], WEIGHT)
        whole = (x > 0).clone()
        return y, x * 1, whole

    compare(model, torch.randn(3, 8))


def test_a_computed_copy_beside_a_written_argument() -> None:
    """The way around the fault above."""

    def model(x: Tensor) -> Any:
        y = x * 1
        ops.fused_add_rms_norm_(y, x, WEIGHT)
        return y, x * 1

    compare(model, torch.randn(3, 8))


@pytest.mark.parametrize("backend", ["torch", "inductor"])
def test_autocast_changes_nothing(backend: str) -> None:
    """An op's arithmetic is its contract's: eager and compiled code give the same bits."""
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ops.attention(q, k, v, backend=backend)

    expected = call(q, k, v)
    compiled = torch.compile(call, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(q, k, v), expected)
        assert torch.equal(compiled(q, k, v), expected)


@pytest.fixture
def tag() -> Iterator[Any]:
    config = torch.compiler.config
    before = config.cache_key_tag
    yield config
    config.cache_key_tag = before


@pytest.mark.usefixtures("declaring")
def test_the_cache_key_has_the_fingerprint_after_the_tag_of_the_user(tag: Any) -> None:
    """Also where the user sets the tag later, at the next compile."""

    def compiled() -> str:
        torch._dynamo.reset()
        torch.compile(torch.ops.torch_ops.silu_and_mul, backend="eager")(torch.randn(2, 4))
        return str(tag.cache_key_tag)

    for own in ("mine", "other|mine", ""):
        tag.cache_key_tag = own
        mark = f"torch_ops:{runtime.fingerprint()}"
        assert compiled().split("|") == [*filter(None, own.split("|")), mark]
        assert mark.startswith(f"torch_ops:{torch_ops.registry.fingerprint()}")
    seen = {mark}
    for change in (_register, _declare, _change_the_fake, _change_what_dissolves):
        change()
        assert compiled() == f"torch_ops:{runtime.fingerprint()}"
        assert compiled() not in seen
        seen.add(compiled())


def _change_what_dissolves() -> None:
    torch_ops.set_inline(rms_norm=True)


def _register() -> None:
    torch_ops.register_kernel(torch_ops.KernelSpec("loose", "torch", "math:sqrt"))


def _declare() -> None:
    @declare.op(contract=Contract())
    def test_inductor_tagged(x: Tensor) -> Tensor:
        return x + 1


def _change_the_fake() -> None:
    @declare.declared["test_inductor_tagged"].fake
    def _fake(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)
