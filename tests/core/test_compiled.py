"""What Inductor's code calls: operators that check nothing again, and all else as ever."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

import torch_ops
from torch_ops import NoBackwardError, declare, inductor, ops
from torch_ops.registry import registry

from . import samples
from .conftest import Python
from .samples import OPS, SOME
from .toy import Toy

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "opaque"),
    # PyTorch's own forward mode scripts its decompositions when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
WEIGHT = torch.linspace(0.5, 1.5, 8)


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, **how)
    return made


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_one_of_the_same_schema(op: str) -> None:
    ours, called = getattr(torch.ops.torch_ops, op), getattr(torch.ops.torch_ops_compiled, op)
    assert sorted(ours.overloads()) == sorted(called.overloads()) == ["backend", "default"]
    for overload in ours.overloads():
        first, second = (str(getattr(packet, overload)._schema) for packet in (ours, called))
        assert first == second.replace("torch_ops_compiled::", "torch_ops::")


@pytest.mark.parametrize("op", SOME)
def test_operators_are_sound(op: str) -> None:
    """Fakes, mutation and aliasing are as the schemas say."""
    made = samples.arguments(op)
    args, tests = tuple(made.values()), samples.opchecks(made)
    packet = getattr(torch.ops.torch_ops_compiled, op)
    torch.library.opcheck(packet.default, args, test_utils=tests)
    torch.library.opcheck(packet.backend, (*args, "torch"), test_utils=tests)


@pytest.mark.parametrize(
    ("way", "dynamic"),
    [
        ("operator", True),
        ("overload", False),
        pytest.param("operator", False, marks=pytest.mark.exhaustive),
        pytest.param("overload", True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("op", SOME)
def test_code_calls_it_by_position(op: str, way: str, dynamic: bool) -> None:
    packet = getattr(torch.ops.torch_ops, op)
    call = packet if way == "operator" else lambda *args: packet.backend(*args, "torch")
    args, copies = samples.arguments(op), samples.arguments(op)
    expected = samples.outputs(op, args, call(*args.values()))
    result, sources = run_and_get_code(compiled(call, dynamic=dynamic), *copies.values())
    found = samples.outputs(op, copies, result)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (source,) = sources
    overload = "default" if way == "operator" else "backend"
    name = f"torch.ops.torch_ops_compiled.{op}.{overload}("
    (line,) = [line for line in source.splitlines() if name in line]
    assert "=" not in line.partition(name)[2]
    assert f"torch.ops.torch_ops.{op}.{overload}(" not in source


def test_arguments_are_checked_while_it_is_traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in ``debug()``, where nothing is trusted."""
    call = compiled(lambda x: ops.rms_norm(x, WEIGHT))
    x = torch.randn(3, 8)
    expected = call(x)
    declaration = declare.declared["rms_norm"]

    def check(*args: Any) -> None:
        raise ValueError("checked")

    monkeypatch.setattr(declaration, "checker", check)
    assert torch.equal(call(x), expected)
    with torch_ops.debug(), pytest.raises(ValueError, match="checked"):
        call(x)
    assert torch.equal(call(x), expected)


def test_bad_arguments_are_refused_while_it_is_traced() -> None:
    call = compiled(ops.rms_norm)
    call(torch.randn(3, 8), WEIGHT)
    for x, weight, text in (
        (torch.randn(3, 7), WEIGHT, r"argument 'weight' is of shape \[8\]"),
        (torch.randn(3, 8), WEIGHT.long(), r"argument 'weight' is torch.int64"),
    ):
        with pytest.raises(TorchRuntimeError, match=f"op 'rms_norm': {text}"):
            call(x, weight)


def test_policy_and_trace_are_obeyed(toy: Toy) -> None:
    for backend, value in (("torch", 1.0), ("inductor", 2.0), ("triton", 3.0)):
        toy.serve(backend, value)
    call, x = compiled(lambda x: ops.toy(x) + ops.toy(x, backend="triton") * 10), torch.ones(2)
    assert call(x).eq(31).all()
    with torch_ops.use_backend("inductor"):
        assert call(x).eq(32).all()
    undo = torch_ops.set_backend(toy="triton")
    assert call(x).eq(33).all()
    undo()
    with torch_ops.trace() as seen:
        for _ in range(2):
            assert call(x).eq(31).all()
    counts = {(record.backend.value, record.source): record.count for record in seen.records}
    assert counts == {("torch", "declared"): 2, ("triton", "call"): 2}
    assert toy.calls["torch"] == 3


def test_memory_that_is_shared_later_is_refused_when_it_runs() -> None:
    """No guard of Dynamo is about it; the words are those of eager code."""
    call = compiled(lambda x, residual: ops.fused_add_rms_norm_(x, residual, WEIGHT))
    call(torch.randn(3, 8), torch.randn(3, 8))
    both = torch.randn(4, 8)
    before = both.clone()
    with pytest.raises(ValueError, match="op 'fused_add_rms_norm_': argument 'x' is at offset 0"):
        call(both[:3], both[1:])
    assert torch.equal(both, before)


def test_tangents_are_refused_when_it_runs() -> None:
    call = torch.compile(lambda x: ops.rms_norm(x, WEIGHT))
    x = torch.randn(3, 8)
    call(x)
    with forward_ad.dual_level(), pytest.raises(NoBackwardError):
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.fixture
def unnoticed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that writes as one of a GPU does: unlike PyTorch's own it bumps no version."""

    def kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        out, total = ops.fused_add_rms_norm(x, residual, weight, eps, backend="torch")
        for written, values in ((x, out), (residual, total)):
            written.detach().numpy()[...] = values.numpy()

    path = registry.find("fused_add_rms_norm_", "torch").target.partition(":")[0]
    monkeypatch.setattr(importlib.import_module(path), "fused_add_rms_norm_", kernel)
    torch_ops.refresh()
    with torch_ops.use_backend(fused_add_rms_norm_="torch"):
        yield
    monkeypatch.undo()
    torch_ops.refresh()


@pytest.mark.usefixtures("unnoticed")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("eager", [False, True])
def test_versions_of_written_arguments_are_bumped(mode: Callable[[], Any], eager: bool) -> None:
    """Or autograd wouldn't notice that a saved tensor was overwritten."""
    write = functools.partial(ops.fused_add_rms_norm_, weight=WEIGHT)
    call = write if eager else compiled(lambda x, r: ops.fused_add_rms_norm_(x, r, WEIGHT))
    tensors = [torch.randn(3, 8) for _ in range(2)]
    with mode():
        for _ in range(3):
            versions = [tensor._version for tensor in tensors]
            call(*tensors)
            assert all(map(operator.gt, [tensor._version for tensor in tensors], versions))


@pytest.mark.usefixtures("unnoticed")
def test_versions_are_bumped_of_what_views_are_of_and_beside_gradients() -> None:
    """AOTAutograd bumps them, not the operators that graphs call."""

    def step(x: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
        ops.fused_add_rms_norm_(x[1:], residual[1:], WEIGHT)
        return (x.detach() * scale).sum()

    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    scale = torch.ones(8, requires_grad=True)
    call = compiled(step)
    for _ in range(2):
        kept = x * scale  # its backward needs x as it was
        before = x._version, residual._version
        call(x, residual, scale).backward()
        assert x._version > before[0]
        assert residual._version > before[1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def test_devices_without_kernels_are_refused_as_in_eager_code() -> None:
    class OnXpu:
        def get_device(self) -> torch.device:
            return torch.device("xpu")

    assert not inductor._on_devices((OnXpu(), 1e-6, None))
    assert inductor._on_devices((1e-6, None))


def _changed() -> None:
    """A function that takes other arguments than we give it."""


@pytest.mark.parametrize("part", ["tag_to_layout_constraint", "make_fallback"])
@pytest.mark.parametrize("error", ["AttributeError", "TypeError"])
def test_without_a_part_of_inductor_the_code_calls_the_operator_itself(
    part: str, error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import lowering

    written = torch.ops.torch_ops.rms_norm.default
    compiled(ops.rms_norm)(torch.randn(5, 30))
    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "_met", inductor._met - {written})
    monkeypatch.delitem(lowering.lowerings, written)
    if error == "AttributeError":
        monkeypatch.delattr(lowering, part)
    else:
        monkeypatch.setattr(lowering, part, _changed)
    x = torch.randn(5, 31 + len(part) + len(error))  # no graph that PyTorch has cached
    with caplog.at_level("INFO", "torch_ops"):
        found, sources = run_and_get_code(compiled(ops.rms_norm), x)
    assert torch.equal(found, ops.rms_norm(x))
    assert "torch.ops.torch_ops.rms_norm.default(" in sources[0]
    assert f"compiled graphs call torch_ops.rms_norm.default itself: {error}" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.exhaustive
def test_a_package_of_aotinductor_calls_the_operator_itself(tmp_path: Path) -> None:
    """It is loaded where no guard holds."""

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return ops.rms_norm(x * 2)

    x = torch.randn(3, 8)
    exported = torch.export.export(Norm(), (x,))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "norm.pt2")
    )
    assert b"torch_ops_compiled" not in Path(path).read_bytes()
    assert torch.equal(torch._inductor.aoti_load_package(path)(x), Norm()(x))


CACHED = """
import torch, torch_ops
from torch._dynamo.utils import counters

x = torch.arange(24.0).view(3, 8)
call = torch.compile(lambda x: torch_ops.ops.silu_and_mul(torch_ops.ops.rms_norm(x)))
assert torch.equal(call(x), torch_ops.ops.silu_and_mul(torch_ops.ops.rms_norm(x)))
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_cached_graph_runs_in_another_process(python: Python, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert [int(python(CACHED, **env)) > 0 for _ in range(2)] == [False, True]


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    torch.ops.torch_ops.append_paged_kv_(k, v, k_cache, v_cache, slots)


def _append_to(k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> None:
    _append(k, v, pool[0], pool[1], slots)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_inductor_would_write_in_a_wrong_place_is_refused(
    inside: bool, dynamic: bool | None
) -> None:
    """Two caches of one tensor, as inputs or split in the graph, of sizes that vary."""
    compiled = torch.compile(_append_to if inside else _append, dynamic=dynamic)
    refused: dict[int, str] = {}
    for pages in (16, 20):
        k, v, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([5, 0, 9])
        pool = torch.randn(2, pages, 4, 2, 8)
        wanted = pool.clone()
        _append(k, v, wanted[0], wanted[1], slots)
        try:
            compiled(k, v, *([pool] if inside else pool), slots)
        except TorchRuntimeError as error:
            refused[pages] = str(error)
        else:
            assert torch.equal(pool, wanted)
    assert list(refused) == ([20] if dynamic is None else [16, 20])
    for text in refused.values():
        assert "_cache', which is written, lies at an offset of a storage it shares" in text
        assert "pytorch#198068" in text


@pytest.mark.parametrize(
    "dynamic",
    [None, True, pytest.param(False, marks=pytest.mark.exhaustive)],
)
def test_caches_of_their_own_and_parts_of_rows_are_written_where_they_are(
    dynamic: bool | None,
) -> None:
    compiled: Callable[..., None] = torch.compile(_append, dynamic=dynamic)
    for pages in (16, 20, 7):
        k, v, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([5, 0, 9])
        caches = [torch.randn(pages, 4, 2, 8) for _ in "kv"]
        wanted = [cache.clone() for cache in caches]
        _append(k, v, wanted[0], wanted[1], slots)
        compiled(k, v, caches[0], caches[1], slots)
        assert all(map(torch.equal, caches, wanted))

    def rotate(x: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
        qkv = x * 2
        q, k, _ = qkv.view(-1, 12, 8).split([6, 3, 3], 1)
        torch.ops.torch_ops.apply_rope_(q, k, cache, positions)
        return qkv

    rotated, table = torch.compile(rotate, dynamic=None if dynamic else dynamic), torch.randn(9, 8)
    for tokens in (4, 7, 5):
        x, positions = torch.randn(tokens, 96), torch.arange(tokens)
        torch.testing.assert_close(rotated(x, table, positions), rotate(x, table, positions))
