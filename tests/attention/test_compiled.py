"""Attention in compiled code: swaps take effect at the next call and compile nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_ops
from torch_ops import dynamo
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    AttentionMetadata,
    apply_attention_backend_override,
    override_attention_backend,
)

from . import support

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ONE, TWO, THREE = "scripted_one", "scripted_two", "scripted_three"
VALUES = {ONE: 1.0, TWO: 2.0, THREE: 3.0}
CYCLE = (ONE, TWO, THREE, ONE, TWO, THREE)


class Counted:
    """A model compiled whole, its frames and graph breaks counted."""

    def __init__(self, model: nn.Module, backend: str = "aot_eager", **options: Any) -> None:
        counters.clear()
        self.counter = CompileCounterWithBackend(backend)
        self.call = torch.compile(model, backend=self.counter, fullgraph=True, **options)

    @property
    def frames(self) -> int:
        return self.counter.frame_count

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self.call(*args)
        assert not counters["graph_break"]
        return out


def expected(model: nn.Module, q: Tensor) -> Tensor:
    """What a stack gives whose layers run scripted kernels."""
    values = [VALUES[value] for value in support.backends(model)]
    return torch.stack([torch.full_like(q, value) for value in values])


@pytest.fixture
def model(script: Any) -> nn.Module:
    built = support.stack(4)
    override_attention_backend(built, ONE)
    return built


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_six_swaps_of_a_whole_model_compile_once(
    model: nn.Module, dynamic: bool | None, mode: Callable[[], Any]
) -> None:
    compiled = Counted(model, dynamic=dynamic)
    q, k, v = support.inputs(Attention(4, 8, 2))
    with mode():
        for target in CYCLE:
            override_attention_backend(model, target)
            for _ in range(2):
                assert torch.equal(compiled(q, k, v), expected(model, q))
    assert compiled.frames == 1


def test_a_graph_reads_what_all_of_its_layers_run_once(script: Any) -> None:
    """It has one input for that, whatever was overridden before and after the compile."""
    model = support.stack(5)
    apply_attention_backend_override(support.layers(model)[2], TWO)
    override_attention_backend(model, THREE, where="layers.[0134]")
    compiled = Counted(model)
    q, k, v = support.inputs(Attention(4, 8, 2))
    assert torch.equal(compiled(q, k, v), expected(model, q))
    override_attention_backend(model, ONE, where="layers.3")
    override_attention_backend(nn.ModuleList([model]), TWO)
    assert torch.equal(compiled(q, k, v), expected(model, q))
    (graph,) = compiled.counter.graphs
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    assert len([name for name in names if name.endswith("_route")]) == 1, names
    assert len([name for name in names if name.endswith("_slot")]) == 5, names
    for node in graph.graph.find_nodes(op="placeholder"):  # CUDA graphs copy the others
        kept = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        assert (kept == "unguarded") is node.name.endswith(("_route", "_slot")), node.name


def test_cuda_graphs_need_not_copy_what_names_a_step() -> None:
    layer = Attention(4, 8, 2, backend="torch_math")
    metadata = AttentionMetadata.ragged([2, 3], device="cpu")
    compiled = Counted(layer)
    q, k, v = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    with torch.no_grad():
        compiled(q, k, v, metadata)
    (graph,) = compiled.counter.graphs
    kept = {
        node.name: node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        for node in graph.graph.find_nodes(op="placeholder")
    }
    (step,) = [name for name in kept if name.endswith("_step")]
    assert kept[step] == "unguarded"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Dimensions of which compiled frames ask tensors, by the call that Dynamo has for it."""
    dims: list[int] = []
    ask = torch._dynamo.utils.call_size

    def noted(tensor: Tensor, dim: int) -> int:
        dims.append(dim)
        return ask(tensor, dim)

    disabled = torch._dynamo.disable(noted)
    monkeypatch.setattr(torch._dynamo.utils, "call_size", disabled)
    return dims


def asks_for_sizes(forward: Callable[..., object]) -> bool:
    """Whether guards of the one frame that was compiled of a function compare sizes in Python."""
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
    return ".size()" in str(entry.guard_manager)


@pytest.mark.parametrize("kept", [True, False])
def test_frames_ask_no_tensor_for_what_names_layers(
    kept: bool, model: nn.Module, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a call by which Dynamo isn't entered, and all of them a guard in Python."""
    if not kept:
        monkeypatch.setattr(dynamo, "_read_kept", lambda graph: None)
    compiled = Counted(model)
    q, k, v = support.inputs(Attention(4, 8, 2))
    for target in CYCLE:
        override_attention_backend(model, target)
        assert torch.equal(compiled(q, k, v), expected(model, q))
    assert asked == ([] if kept else [0] * 5 * len(CYCLE)), "four layers, and what they run"
    assert asks_for_sizes(type(model).forward) is not kept
    assert compiled.frames == 1


@pytest.mark.parametrize("kept", [True, False])
def test_frames_ask_no_tensor_for_what_names_steps(
    kept: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(dynamo, "_read_kept", lambda graph: None)
    layer = Attention(4, 8, 2, backend="torch_math")
    compiled = Counted(layer)
    q, k, v = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    with torch.no_grad():
        for lens in ([2, 3], [1, 4], [5, 0], [2, 3]):
            metadata = AttentionMetadata.ragged(lens, device="cpu")
            assert torch.equal(compiled(q, k, v, metadata), layer(q, k, v, metadata))
    assert sorted(asked) == ([] if kept else [0] * 12 + [1] * 4 + [2] * 4)
    assert asks_for_sizes(Attention.forward) is not kept
    assert compiled.frames == 1


@pytest.mark.parametrize(
    ("part", "asks"),
    [
        ((torch._dynamo.source, "GetItemSource"), [0, 0]),
        ((ShapeEnv, "_default_unspecified_value_range"), []),
    ],
)
def test_frames_ask_for_sizes_where_pytorch_lacks_a_part(
    part: tuple[Any, str], asks: list[int], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(*part)
    layer = Attention(4, 8, 2, backend="torch_math")
    compiled = Counted(layer)
    inputs = support.inputs(layer)
    for calls, target in enumerate(("torch_flash", "torch_math"), 1):
        apply_attention_backend_override(layer, target)
        assert torch.equal(compiled(*inputs), layer(*inputs))
        assert asked == asks * calls
    assert asks_for_sizes(Attention.forward)
    assert compiled.frames == 1


def swaps(model: nn.Module) -> list[Callable[[], object]]:
    """Twenty changes: of all layers, of some, of one, to the default and back."""
    single = support.layers(model)
    tokens: list[Any] = []

    def everything(target: str | None) -> Callable[[], object]:
        return lambda: override_attention_backend(model, target)

    def some(target: str, where: str) -> Callable[[], object]:
        return lambda: tokens.append(override_attention_backend(model, target, where=where))

    def one(index: int, target: str) -> Callable[[], object]:
        return lambda: apply_attention_backend_override(single[index], target)

    def undo() -> None:
        tokens.pop().undo()

    return [
        everything(TWO), one(0, ONE), one(3, THREE), everything(ONE), some(THREE, "layers.[12]"),
        some(TWO, "layers.3"), undo, undo, everything(THREE), one(2, ONE),
        one(2, TWO), one(2, THREE), everything(ONE), everything(TWO), everything(ONE),
        one(1, TWO), some(ONE, "layers.1"), undo, everything(THREE), everything(TWO),
    ]  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_twenty_swaps_are_never_stale(model: nn.Module, dynamic: bool | None) -> None:
    compiled = Counted(model, dynamic=dynamic)
    q, k, v = support.inputs(Attention(4, 8, 2))
    changes = swaps(model)
    assert len(changes) == 20
    seen = set()
    for change in changes:
        change()
        out = compiled(q, k, v)
        assert torch.equal(out, expected(model, q))
        seen.add(tuple(out[:, 0, 0, 0, 0].tolist()))
    assert len(seen) > 8
    assert compiled.frames == 1


def test_inductor_swaps_real_kernels(device: torch.device) -> None:
    model = support.stack(3).to(device, torch.bfloat16)
    override_attention_backend(model, "torch_math")
    compiled = Counted(model, backend="inductor")
    inputs = support.inputs(support.layers(model)[0], device=device, dtype=torch.bfloat16)
    ran = {}
    for target in ("torch_math", "torch_flash", "torch_math", "torch_flash"):
        override_attention_backend(model, target)
        out = compiled(*inputs)
        assert torch.equal(out, model(*inputs))
        for layer, part in zip(support.layers(model), out, strict=True):
            assert support.worst(part, layer.spec, *inputs) <= 1
        ran[target] = support.sdpa(lambda: compiled(*inputs))
    assert len(ran["torch_math"]) == len(ran["torch_flash"]) == 1
    assert ran["torch_math"] != ran["torch_flash"]
    assert compiled.frames == 1


@pytest.mark.exhaustive
def test_a_compiled_family_inside_a_compiled_model(device: torch.device) -> None:
    model = support.Stack(*(Attention(4, 16, 2, is_causal=True).to(device) for _ in range(2)))
    compiled = Counted(model)
    inputs = support.inputs(support.layers(model)[0], device=device)
    for target in ("torch_math", "inductor", "torch_math", "inductor"):
        override_attention_backend(model, target)
        with torch_ops.trace() as trace:
            out = compiled(*inputs)
        assert [(r.backend.value, r.count) for r in trace.records] == [(target, 2)]
        assert torch.equal(out, model(*inputs))
    assert compiled.frames == 1


def test_the_first_swap_may_come_before_the_first_call(model: nn.Module) -> None:
    compiled = Counted(model)
    override_attention_backend(model, TWO)
    q, k, v = support.inputs(Attention(4, 8, 2))
    assert torch.equal(compiled(q, k, v), expected(model, q))
    layer = Attention(4, 8, 2, backend=ONE)
    alone = Counted(layer)
    apply_attention_backend_override(layer, TWO)
    assert alone(q, k, v).eq(2).all()
    apply_attention_backend_override(layer, None)
    assert alone(q, k, v).eq(1).all()
    assert (compiled.frames, alone.frames) == (1, 1)


def test_no_swap_recompiles_wherever_it_is_made(model: nn.Module) -> None:
    compiled = Counted(model)
    q, k, v = support.inputs(Attention(4, 8, 2))
    compiled(q, k, v)
    contexts: list[Callable[[], Any]] = [
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ]
    try:
        for context, target in zip(contexts, itertools.cycle([TWO, THREE])):
            with context():
                override_attention_backend(model, target)
            assert torch.equal(compiled(q, k, v), expected(model, q))
        torch.set_default_dtype(torch.float16)
        other = support.stack(4)
        override_attention_backend(other, TWO)
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled.frames == 1
    assert len({one._group.route.dtype for m in (model, other) for one in support.layers(m)}) == 1


def test_nothing_recompiles_under_a_stance_that_forbids_it(model: nn.Module) -> None:
    compiled = Counted(model)
    q, k, v = support.inputs(Attention(4, 8, 2))
    compiled(q, k, v)
    with torch.compiler.set_stance("fail_on_recompile"):
        for target in (TWO, ONE, THREE):
            override_attention_backend(model, target)
            assert torch.equal(compiled(q, k, v), expected(model, q))


@pytest.mark.parametrize("dynamic", [None, True])
def test_ten_layers_compiled_one_by_one(script: Any, dynamic: bool | None) -> None:
    model = support.stack(10)
    override_attention_backend(model, ONE)
    counter = CompileCounterWithBackend("aot_eager")
    apart = [
        torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
        for layer in support.layers(model)
    ]
    q, k, v = support.inputs(Attention(4, 8, 2))
    for change in swaps(model):
        change()
        out = torch.stack([call(q, k, v) for call in apart])
        assert torch.equal(out, expected(model, q))
    assert counter.frame_count <= 2


def test_twelve_different_layers_compiled_one_by_one(script: Any) -> None:
    geometry: Any = itertools.product((2, 4), (8, 16), (False, True))
    model = support.Stack(
        *(Attention(h, d, is_causal=causal, scale=1.0) for h, d, causal in geometry),
        *(Attention(4, 8, 2, is_causal=True, window_left=w) for w in (1, 2, 3, 4)),
    )
    counter = CompileCounterWithBackend("aot_eager")
    apart = [torch.compile(x, backend=counter, fullgraph=True) for x in support.layers(model)]
    assert len(apart) == 12
    for target in CYCLE:
        override_attention_backend(model, target)
        for layer, call in zip(support.layers(model), apart, strict=True):
            assert call(*support.inputs(layer)).eq(VALUES[target]).all()
    assert counter.frame_count <= 4, "one for each shape at first, then one for all"


def test_blocks_compiled_in_place(script: Any) -> None:
    """As `module.compile()` does it, which leaves the modules where they are."""
    counters.clear()
    model = support.stack(4)
    for layer in support.layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    q, k, v = support.inputs(Attention(4, 8, 2))
    for target in CYCLE:
        override_attention_backend(model, target)
        assert torch.equal(model(q, k, v), expected(model, q))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_batch_sizes(model: nn.Module, dynamic: bool | None) -> None:
    compiled = Counted(model, dynamic=dynamic)
    layer = Attention(4, 8, 2)
    for batch, target in zip((2, 3, 5, 8, 64, 1009, 2), itertools.cycle(CYCLE)):
        override_attention_backend(model, target)
        q, k, v = support.inputs(layer, batch=batch)
        assert torch.equal(compiled(q, k, v), expected(model, q))
    assert compiled.frames <= 2
    for batch in (0, 1):
        q, k, v = support.inputs(layer, batch=batch)
        want = expected(model, q) if batch else torch.zeros(4, *q.shape)
        assert torch.equal(compiled(q, k, v), want)
    assert compiled.frames <= 4


def test_a_batch_as_large_as_an_id_is_no_id(script: Any) -> None:
    model = support.stack(2)
    for target in (ONE, TWO, THREE):
        override_attention_backend(model, target)
    layers = support.layers(model)
    ids = [state.id for state in layers[0]._group._routes]
    ids += [layer._slot.shape[0] for layer in layers]
    compiled = Counted(model, dynamic=True)
    layer = Attention(4, 8, 2)
    for batch in ids:
        for target in (THREE, ONE, TWO):
            override_attention_backend(model, target)
            q, k, v = support.inputs(layer, batch=batch, queries=2, keys=2)
            assert torch.equal(compiled(q, k, v), expected(model, q))
    for target in CYCLE:
        override_attention_backend(model, target)
        q, k, v = support.inputs(layer)
        assert torch.equal(compiled(q, k, v), expected(model, q))
    assert compiled.frames <= 2, "one more for the id and the batch that were equal at first"


def test_new_ids_after_a_compile_are_followed(model: nn.Module) -> None:
    compiled = Counted(model)
    q, k, v = support.inputs(Attention(4, 8, 2))
    compiled(q, k, v)
    before = {layer._group.route.shape[0] for layer in support.layers(model)}
    for target in (TWO, THREE, None):
        override_attention_backend(model, target)
        compiled(q, k, v)
        after = {layer._group.route.shape[0] for layer in support.layers(model)}
        assert before.isdisjoint(after)
    assert compiled.frames == 1


def plain() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    model = support.stack(2)
    return model, support.inputs(support.layers(model)[0])


def traced(call: Callable[[], object]) -> list[tuple[str, str, int]]:
    with torch_ops.trace() as trace:
        call()
    return [(r.backend.value, r.source, r.count) for r in trace.records]


def test_scopes_around_compiled_layers_take_effect(script: Any) -> None:
    model, inputs = plain()
    compiled = Counted(model)

    def ran() -> list[tuple[str, str, int]]:
        return traced(lambda: compiled(*inputs))

    assert ran() == [("torch_flash", "declared", 2)]
    for _ in range(3):
        with torch_ops.use_backend(attention="scripted"):
            assert ran() == [(ONE, "scope", 2)]
            with torch_ops.use_backend("torch"):
                assert ran() == [("torch_flash", "scope", 2)]
        with torch_ops.use_backend(rms_norm="torch"):
            assert ran() == [("torch_flash", "declared", 2)]
        assert ran() == [("torch_flash", "declared", 2)]
    assert compiled.frames <= 3, "one for each distinct choice, none for going back"


def test_process_and_environment_take_effect_in_compiled_layers(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = plain()
    compiled = Counted(model)

    def ran() -> list[tuple[str, str, int]]:
        return traced(lambda: compiled(*inputs))

    assert ran() == [("torch_flash", "declared", 2)]
    for _ in range(2):
        undo = torch_ops.set_backend("scripted")
        assert ran() == [(ONE, "process", 2)]
        undo()
        assert ran() == [("torch_flash", "declared", 2)]
        monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=scripted")
        torch_ops.refresh()
        assert ran() == [(ONE, "environment", 2)]
        monkeypatch.delenv("TORCH_OPS_BACKEND")
        torch_ops.refresh()
        assert ran() == [("torch_flash", "declared", 2)]
    assert compiled.frames <= 2
    override_attention_backend(model, TWO, where="layers.1")
    with torch_ops.use_backend("scripted"):
        assert ran() == [(ONE, "scope", 1), (TWO, "layer", 1)]


def test_a_disabled_backend_raises_in_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = plain()
    override_attention_backend(model, "torch_math")
    compiled = Counted(model)
    compiled(*inputs)
    monkeypatch.setenv("TORCH_OPS_DISABLE", "torch")
    torch_ops.refresh()
    with pytest.raises(torch_ops.BackendUnavailableError, match="TORCH_OPS_DISABLE=torch"):
        compiled(*inputs)
    monkeypatch.delenv("TORCH_OPS_DISABLE")
    torch_ops.refresh()
    compiled(*inputs)
    assert compiled.frames == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q, k[:1], v[:1]), "argument 'k' is of shape"),
        (lambda q, k, v: (q, k.double(), v), "argument 'k' is torch.float64"),
        (lambda q, k, v: (q[0], k, v), "argument 'q' is of shape"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "an input requires grad"),
        (lambda q, k, v: (q, k.to("meta"), v), "argument 'k' is on device meta"),
        (lambda q, k, v: (q, "k", v), "argument 'k' is a str"),
        (lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), "as the layer was built"),
    ],
)
def test_compiled_code_refuses_what_eager_code_refuses(
    change: Callable[..., tuple[Any, Any, Any]], text: str
) -> None:
    layer = Attention(4, 8, 2)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=text):
        layer(*change(*support.inputs(layer)))
    with pytest.raises(Exception, match=text):
        compiled(*change(*support.inputs(layer)))


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("target", ["torch_math", "torch_flash"])
def test_outputs_are_alike_in_eager_and_compiled_code(target: str, device: torch.device) -> None:
    layer = Attention(4, 8, 2, is_causal=True, backend=target).to(device, torch.bfloat16)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries in (1, 3, 7):
        q, k, v = support.inputs(layer, queries=queries, device=device, dtype=torch.bfloat16)
        for call in ((q, k, v), (heads_first(q), heads_first(k), v)):
            eager, got = layer(*call), compiled(*call)
            assert torch.equal(eager, got)
            assert (eager.dtype, eager.stride()) == (got.dtype, got.stride())


def test_opcheck_accepts_the_operator_of_the_layers() -> None:
    layer = Attention(4, 8, 2, is_causal=True)
    q, k, v = support.inputs(layer)
    packet = torch.ops.torch_ops._attention_layer.default
    for args in ((q, k, v), (q[:0], k[:0], v[:0]), (q.transpose(1, 2).mT.mT.transpose(1, 2), k, v)):
        verdicts = torch.library.opcheck(packet, (*args, layer._slot, layer._group.route))
        assert set(verdicts.values()) == {"SUCCESS"}, verdicts


@pytest.mark.parametrize("strict", [True, False])
def test_export_is_refused(strict: bool) -> None:
    layer = Attention(4, 8, 2)
    text = "Attention can't be exported: .*torch.ops.torch_ops.attention"
    with pytest.raises(Exception, match=text):
        torch.export.export(layer, support.inputs(layer), strict=strict)


def test_layers_run_below_a_graph_break(script: Any) -> None:
    model = support.stack(2)

    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first: Tensor = model(q, k, v)
        torch._dynamo.graph_break()
        second: Tensor = model(q, k, v)
        return first + second

    compiled = torch.compile(broken, backend="aot_eager")
    q, k, v = support.inputs(Attention(4, 8, 2))
    for target in CYCLE:
        override_attention_backend(model, target)
        assert torch.equal(compiled(q, k, v), 2 * expected(model, q))


def test_an_override_between_two_parts_of_a_broken_graph(script: Any) -> None:
    layer = Attention(4, 8, 2, backend=ONE)

    swap: Any = torch.compiler.disable(lambda: apply_attention_backend_override(layer, TWO))

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = layer(q, k, v)
        swap()
        return first, layer(q, k, v)

    compiled = torch.compile(both, backend="aot_eager")
    inputs = support.inputs(layer)
    for _ in range(2):
        apply_attention_backend_override(layer, None)
        first, second = compiled(*inputs)
        assert first.eq(1).all()
        assert second.eq(2).all()
    assert layer.backend is AttentionBackend(TWO)
