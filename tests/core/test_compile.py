"""Compiled code: no graph break, few graphs, and the kernel that the present policy chooses."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

import torch_ops
from torch_ops import NoBackwardError, Requirement, UnknownVariableError, ops
from torch_ops.declarations import catalogue

from . import samples
from .conftest import Install
from .samples import CELLS, OPS, SOME, Arguments
from .toy import Toy

VALUES = {"torch": 1.0, "inductor": 2.0, "triton": 3.0}


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def served(toy: Toy) -> Toy:
    for backend, value in VALUES.items():
        toy.serve(backend, value)
    return toy


def counted(function: Callable[..., Any], **how: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


def copied(args: Arguments) -> Arguments:
    return samples.lay_out(args, "contiguous")


def runs(op: str, call: Callable[..., Any], args: Arguments) -> list[Tensor]:
    made = copied(args)
    return samples.outputs(op, made, call(*made.values()))


# ------------------------------------------------------------------ every op, every way


@pytest.mark.parametrize(
    "way",
    [
        "operator",
        pytest.param("overload", marks=pytest.mark.exhaustive),
        pytest.param("callable", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("op", SOME)
def test_every_way_of_calling_compiles_whole(op: str, way: str) -> None:
    """The result of eager code, without a graph break, and nothing anew when called again."""
    packet, callable_ = getattr(torch.ops.torch_ops, op), getattr(ops, op)
    calls: dict[str, Callable[..., Any]] = {
        "operator": packet,
        "overload": lambda *a: packet.backend(*a, "torch"),
        "callable": lambda *a: callable_(*a, backend="torch"),
    }
    args = samples.arguments(op)
    expected = runs(op, calls[way], args)
    compiled, counter = counted(calls[way])
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            for _ in range(2):
                found = runs(op, compiled, args)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counter.frame_count <= 3, "at most one a mode"


@pytest.mark.parametrize("op", SOME)
def test_few_graphs_over_batch_sizes(op: str) -> None:
    """Two over sizes from 2 up, one more each for 1 and 0."""
    packet: Any = getattr(torch.ops.torch_ops, op)
    compiled, counter = counted(packet)
    for sizes, limit in (((5, 6, 7, 8, 2, 31), 2), ((1, 9), 3), ((0, 1, 3), 4)):
        for rows in sizes:
            args = samples.arguments(op, rows)
            expected = runs(op, packet, args)
            found = runs(op, compiled, args)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert counter.frame_count <= limit


@pytest.mark.parametrize("op", SOME)
def test_one_graph_where_shapes_are_dynamic_from_the_start(op: str) -> None:
    packet: Any = getattr(torch.ops.torch_ops, op)
    compiled, counter = counted(packet, dynamic=True)
    parameters = catalogue()[op].signature.parameters
    for rows in (7, 9, 31):  # no size of another dimension: equal ones are taken for one
        given = [
            value
            for name, value in samples.arguments(op, rows).items()
            if isinstance(value, Tensor) or parameters[name].default is inspect.Parameter.empty
        ]
        compiled(*given)
    tried = any(isinstance(value, float) for value in given)  # as a symbol, before as a constant
    assert counter.frame_count == 1 + tried


def test_fifty_batch_sizes_cost_two_graphs() -> None:
    compiled, counter = counted(lambda x: ops.silu_and_mul(ops.rms_norm(x)))
    for rows in random.Random(0).sample(range(2, 200), 50):
        assert compiled(torch.randn(rows, 8)).shape == (rows, 4)
    assert counter.frame_count <= 2


def test_eligibility_may_depend_on_a_dynamic_size(toy: Toy) -> None:
    """The predicate sees real numbers when the graph runs; no graph is made for its branches."""
    seen: list[int] = []

    def few_rows(x: Tensor, n: int) -> str | None:
        assert type(x.shape[0]) is int
        seen.append(x.shape[0])
        return None if x.shape[0] < 6 else f"{x.shape[0]} rows (supported: fewer than 6)"

    toy.serve("torch", 1, supports=few_rows)
    toy.serve("inductor", 2)
    compiled, counter = counted(ops.toy, dynamic=True)
    for rows, value in ((4, 1), (7, 2), (5, 1), (60, 2)):
        assert compiled(torch.ones(rows, 3)).eq(value).all()
    assert counter.frame_count == 1
    assert set(seen) == {4, 7, 5, 60}


def test_rows_whose_number_depends_on_data() -> None:
    """An unbacked size goes through checks, fake and kernel."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled, counter = counted(lambda x, mask: ops.rms_norm(x[mask]))
        x = torch.randn(6, 8)
        for mask in (x[:, 0] > 0, x[:, 0] > 9, x[:, 0] < 9):
            assert torch.equal(compiled(x, mask), ops.rms_norm(x[mask]))
    assert counter.frame_count == 1


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_call_after_a_graph_break_is_not_traced_into(autocast: bool) -> None:
    """Dynamo compiles the frames of the user and none of ours."""

    def broken(x: Tensor) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        return y, list(map(torch.ops.torch_ops.rms_norm, [y]))

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(broken, backend=counter)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            _, (found,) = compiled(x)
            assert torch.equal(found, ops.rms_norm(x + 1))
    for graph in counter.graphs:
        targets = {str(node.target) for node in graph.graph.nodes}
        assert not any("rsqrt" in target for target in targets)


# ------------------------------------------------------------------ choices


def test_a_literal_backend_costs_no_recompile(served: Toy) -> None:
    compiled, counter = counted(lambda x: ops.toy(x, backend="triton") + ops.toy(x))
    for _ in range(3):
        assert compiled(torch.ones(2)).eq(4).all()
        torch_ops.set_backend(toy="inductor")()
    assert counter.frame_count == 1
    with torch_ops.use_backend("inductor"):
        assert compiled(torch.ones(2)).eq(5).all()
    assert counter.frame_count == 2


def test_a_varying_backend_costs_a_graph_per_value(served: Toy) -> None:
    compiled, counter = counted(lambda x, name: torch.ops.torch_ops.toy.backend(x, 1, name))
    x = torch.ones(2)
    for _ in range(2):
        for name, value in VALUES.items():
            assert compiled(x, name).eq(value).all()
    assert counter.frame_count == len(VALUES)


def test_members_and_values_are_one_choice(served: Toy) -> None:
    compiled, counter = counted(lambda x: ops.toy(x, backend=torch_ops.Backend.TRITON))
    assert compiled(torch.ones(2)).eq(3).all()
    assert counter.frame_count == 1


def test_process_choice_takes_effect_in_compiled_code(served: Toy) -> None:
    compiled, counter = counted(lambda x: ops.toy(x) + ops.silu_and_mul(x)[..., :1] * 0)
    x = torch.ones(2, 4)
    assert compiled(x).eq(1).all()
    undo = torch_ops.set_backend(toy="triton")
    assert compiled(x).eq(3).all()
    assert counter.frame_count == 2
    undo()
    assert compiled(x).eq(1).all()
    torch_ops.set_backend(toy="triton")
    assert compiled(x).eq(3).all()
    assert counter.frame_count == 2


def test_scope_takes_effect_in_compiled_code(served: Toy) -> None:
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    with torch_ops.use_backend("triton"):
        assert compiled(x).eq(3).all()
    assert compiled(x).eq(1).all()
    with torch_ops.use_backend(toy="inductor"):
        assert compiled(x).eq(2).all()
        with torch_ops.use_backend("triton"):
            assert compiled(x).eq(3).all()
    assert compiled(x).eq(1).all()
    assert counter.frame_count == 3


def test_environment_takes_effect_in_compiled_code(
    served: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    assert compiled(x).eq(1).all()
    monkeypatch.setenv("TORCH_OPS_BACKEND", "toy=triton")
    assert compiled(x).eq(1).all()
    torch_ops.refresh()
    assert compiled(x).eq(3).all()
    monkeypatch.setenv("TORCH_OPS_DISABLE", "toy:torch")
    monkeypatch.delenv("TORCH_OPS_BACKEND")
    torch_ops.refresh()
    assert compiled(x).eq(2).all()
    monkeypatch.delenv("TORCH_OPS_DISABLE")
    torch_ops.refresh()
    assert compiled(x).eq(1).all()
    assert counter.frame_count == 3
    monkeypatch.setenv("TORCH_OPS_BACKNED", "triton")
    torch_ops.refresh()
    with pytest.raises(UnknownVariableError, match="TORCH_OPS_BACKNED"):
        compiled(x)


def test_registration_takes_effect_in_compiled_code(served: Toy) -> None:
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    assert compiled(x).eq(1).all()
    spec = torch_ops.registry.find("toy", "torch")
    torch_ops.registry.unregister(spec)
    assert compiled(x).eq(2).all()
    torch_ops.registry.register(spec)
    assert compiled(x).eq(1).all()
    assert counter.frame_count == 2


def test_fifty_changes_among_three_choices_cost_three_graphs(served: Toy) -> None:
    """In every order, by scope and by process, with two ops in the frame: one compile each."""
    compiled, counter = counted(lambda x: ops.toy(ops.toy(x)) + ops.rms_norm(x) * 0)
    x = torch.ones(2, 4)
    pick = random.Random(0)
    for _ in range(50):
        name = pick.choice(list(VALUES))
        if pick.random() < 0.5:
            undo = torch_ops.set_backend(toy=name)
            assert compiled(x).eq(VALUES[name]).all()
            undo()
        else:
            with torch_ops.use_backend(toy=name):
                assert compiled(x).eq(VALUES[name]).all()
    assert counter.frame_count == 3


def test_what_does_not_concern_a_frame_compiles_nothing(served: Toy) -> None:
    """A choice for another op, the same choice from another source, refresh, trace, debug."""
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    compiled(x)
    torch_ops.set_backend(rms_norm="inductor")
    torch_ops.set_backend(toy="torch")
    compiled(x)
    with torch_ops.use_backend("torch"), torch_ops.trace(), torch_ops.debug():
        compiled(x)
    torch_ops.refresh()
    torch_ops.register_kernel(torch_ops.KernelSpec("loose", "torch", "math:sqrt"))
    compiled(x)
    assert counter.frame_count == 1


def test_a_choice_that_cannot_run_raises_in_compiled_code(served: Toy) -> None:
    """With the text of eager code; going back compiles nothing."""
    served.serve("sgl_kernel", 6, requires=[Requirement.cuda()])
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    compiled(x)
    for name, message in (
        ("sgl_kernel", r"backend 'sgl_kernel', chosen by process, is not usable here"),
        ("aiter", "No 'aiter' backend registered for op 'toy'"),
    ):
        undo = torch_ops.set_backend(toy=name)
        with pytest.raises(torch_ops.TorchOpsError, match=message):
            ops.toy(x)
        with pytest.raises(Exception, match=message):
            compiled(x)
        undo()
    made = counter.frame_count
    assert compiled(x).eq(1).all()
    assert counter.frame_count == made <= 3


def test_threads_with_scopes_of_their_own_share_compiled_code(served: Toy) -> None:
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    for name, value in VALUES.items():
        with torch_ops.use_backend(name):
            assert compiled(x).eq(value).all()
    barrier = threading.Barrier(3)

    def work(name: str) -> bool:
        barrier.wait(20)
        with torch_ops.use_backend(name):
            return all(bool(compiled(x).eq(VALUES[name]).all()) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, VALUES)) == [True] * 3
    assert counter.frame_count == 3


def test_changes_under_load_give_one_choice_or_the_other(served: Toy) -> None:
    """A thread that changes the process's choice while others call compiled code."""
    compiled, counter = counted(ops.toy)
    x = torch.ones(2)
    for name in ("torch", "triton"):
        with torch_ops.use_backend(name):
            compiled(x)
    stop = threading.Event()

    def work(_: int) -> int:
        count = 0
        while not stop.is_set():
            value = float(compiled(x)[0])
            assert value in (1.0, 3.0)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, index) for index in range(4)]
        for _ in range(200):
            torch_ops.set_backend(toy="triton")()
        stop.set()
        assert all(future.result() > 0 for future in futures)
    # A change between the guards of two graphs lets both fail, and compiles one of them again.
    assert 2 <= counter.frame_count < torch._dynamo.config.recompile_limit


# ------------------------------------------------------------------ proof of what ran


def kernels_of(call: Callable[[], Any]) -> set[str]:
    call()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {event.key for event in seen.key_averages()}


MARKS = {
    "torch": {"aten::pow", "aten::mean"},
    "acme": {"aten::linalg_vector_norm"},
}
"""ATen kernels that only this backend's rms_norm calls."""


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("outer", ["eager", "aot_eager", "inductor"])
def test_the_profiler_sees_the_kernel_that_explain_names(outer: str, install: Install) -> None:
    install("acme")
    x, weight = torch.randn(3, 8), torch.randn(8)
    plain: Any = torch.ops.torch_ops.rms_norm
    call: Any = plain if outer == "eager" else torch.compile(plain, backend=outer, fullgraph=True)
    for name in ("torch", "inductor", "acme", "torch"):
        with torch_ops.use_backend(name):
            assert torch_ops.explain("rms_norm", x, weight).chosen == name
            ran = kernels_of(lambda: call(x, weight))
        inside = "torch_ops_compiled" if outer == "inductor" else "torch_ops"
        assert f"{inside}::rms_norm" in ran
        for other, marks in MARKS.items():
            assert ran & marks == (marks if other == name else set())
        regions = [key for key in ran if "Torch-Compiled Region" in key]
        assert len(regions) == (outer != "eager") + (name == "inductor")
        assert any("CompiledFxGraph" in key for key in ran) == ("inductor" in (name, outer))


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        cell
        for cell in (*((op, None) for op in OPS), *CELLS)
        if cell[0] in samples.FLOATING and not catalogue()[cell[0]].differentiable
    ],
)
def test_an_input_that_requires_grad_is_refused_alike(op: str, backend: str | None) -> None:
    """The same text in eager and compiled code, for every floating tensor argument."""
    args = samples.arguments(op)
    call = getattr(ops, op)
    full = (
        f"op '{op}': an input requires grad and no backend of the op has a backward "
        r"\(accepted: inputs without grad, or calls under torch.no_grad\(\) or "
        r"torch.inference_mode\(\)\); detach the input or leave grad mode"
    )
    names = [
        name
        for name in catalogue()[op].tensor_arguments
        if args[name].is_floating_point()
    ]  # fmt: skip
    for name in names:
        made = copied(args)
        made[name].requires_grad_()
        before = made[name].detach().clone()
        with pytest.raises(NoBackwardError, match=full) as raised:
            call(**made, backend=backend)
        assert raised.value.op == op
        with torch.no_grad():
            call(**copied(made), backend="torch")
        assert torch.equal(made[name], before)
    compiled, _ = counted(lambda *a: call(*a, backend=backend))
    with pytest.raises(TorchRuntimeError, match=full):
        compiled(*made.values())
    if backend is None:
        with torch.no_grad():
            compiled(*copied(made).values())
