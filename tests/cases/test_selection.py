"""Reports about selection, registration and compiled ops, each with the right outcome here.

A test names the report that it comes from. What was wrong there can't happen here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

import torch_ops
from tests.core.conftest import Install, Python
from tests.core.toy import Toy
from torch_ops import (
    Backend,
    BackendUnavailableError,
    DeclarationError,
    KernelSpec,
    NoBackendError,
    NoBackwardError,
    Platform,
    Requirement,
    UnknownVariableError,
    declare,
    ops,
    policy,
)
from torch_ops.contracts import Contract
from torch_ops.declarations import catalogue

CPU = Platform.cpu()


def counted(function: Callable[..., Any]) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def ran(call: Callable[[], Any]) -> set[str]:
    call()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {event.key for event in seen.key_averages()}


class TestSelection:
    """Selection, override, registration, compile."""

    def test_01_vllm_50292_environment_is_not_ignored(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        for name, value, message in (
            ("TORCH_OPS_BACKNED", "triton", r"Did you mean 'TORCH_OPS_BACKEND'\?"),
            ("TORCH_OPS_BACKEND", "toy=nope", r"'nope' is not a Backend. Known: 'torch', 'induct"),
            ("TORCH_OPS_BACKEND", "nope=torch", r"names the unknown op 'nope'"),
        ):
            monkeypatch.setenv(name, value)
            torch_ops.refresh()
            with pytest.raises(UnknownVariableError, match=message):
                toy()
            monkeypatch.delenv(name)
        monkeypatch.setenv("TORCH_OPS_BACKEND", "toy=triton")
        torch_ops.refresh()
        assert torch_ops.explain("toy", torch.ones(2)).source == "environment"
        assert toy() == 3

    def test_02_vllm_22738_no_choice_outlives_a_change(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same in a forked worker: tests/core/test_processes.py."""
        spec = toy.serve("torch", 1)
        toy.serve("triton", 3)
        generation = policy.generation
        for change, value in (
            (lambda: monkeypatch.setenv("TORCH_OPS_BACKEND", "toy=triton"), 3),
            (lambda: monkeypatch.delenv("TORCH_OPS_BACKEND"), 1),
            (lambda: torch_ops.registry.unregister(spec), 3),
            (lambda: torch_ops.register_kernel(spec), 1),
        ):
            toy()
            change()
            torch_ops.refresh()
            assert toy() == value
            assert torch_ops.select_kernel("toy", platform=CPU) == torch_ops.registry.find(
                "toy", "torch" if value == 1 else "triton"
            )
        assert policy.generation > generation

    def test_05_diffusers_14249_scopes_do_not_leak(self, toy: Toy) -> None:
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        with torch_ops.use_backend("triton"), ThreadPoolExecutor(1) as pool:
            assert (toy(), pool.submit(toy).result()) == (3, 1)

        async def task(name: str, value: float, barrier: asyncio.Barrier) -> None:
            with torch_ops.use_backend(name):
                await barrier.wait()
                assert toy() == value
                await barrier.wait()
            assert toy() == 1

        async def both() -> None:
            barrier = asyncio.Barrier(2)
            await asyncio.gather(task("triton", 3, barrier), task("torch", 1, barrier))

        asyncio.run(both())
        undo = torch_ops.set_backend("triton")
        undo()
        assert toy() == 1

    def test_07_diffusers_12605_no_argument_is_dropped(self, install: Install) -> None:
        """A backend that can't take an argument is ineligible with a reason that names it."""
        install("acme")
        x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8)
        with pytest.raises(BackendUnavailableError, match=r"weight dtype torch\.float32"):
            ops.rms_norm(x, weight, backend="acme")
        with pytest.raises(BackendUnavailableError, match="weight is None"):
            ops.rms_norm(x, backend="acme")
        assert torch.equal(ops.rms_norm(x, weight), ops.rms_norm(x, weight, backend="torch"))

    def test_11_tileops_1841_backends_outside_of_every_order(self, install: Install) -> None:
        """Selectable without an edit; one for another arch is merely ineligible."""
        install("acme", "absent")
        x = torch.randn(3, 8)
        assert ops.silu_and_mul(x, backend="acme").shape == (3, 4)
        with torch_ops.use_backend(rms_norm="acme"):
            assert torch_ops.explain("rms_norm", x, torch.ones(8)).chosen == "acme"
        judged = {c.backend.value: c for c in torch_ops.explain("rms_norm", x).candidates}
        assert not judged["absent"].usable
        assert ops.rms_norm(x).shape == x.shape

    def test_13_flashinfer_3255_a_tuned_choice_that_cannot_serve_a_shape(self, toy: Toy) -> None:
        """A tuned one may be skipped, with the reason; explicit ones raise; nothing is retried."""
        toy.serve("torch", 1)
        toy.serve("triton", 3, supports=lambda x, n: f"n {n} (up to 4)" if n > 4 else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(policy.tuned, ("cpu", None, "toy"), Backend.TRITON)
            policy.invalidate()
            assert torch_ops.explain("toy", torch.ones(2), 4).source == "tuned"
            with torch_ops.trace() as seen:
                assert (toy(n=4), toy(n=5)) == (3, 1)
            assert [(r.backend, r.source) for r in seen.records] == [
                (Backend.TRITON, "tuned"),
                (Backend.TORCH, "tuned"),
            ]
            assert seen.records[1].skipped == (("triton", "n 5 (up to 4)"),)
            with pytest.raises(BackendUnavailableError, match=r"n 5 \(up to 4\)"):
                toy("triton", n=5)
        policy.invalidate()
        assert toy.calls == {"triton": 1, "torch": 1}

    def test_14_flashinfer_3405_a_better_backend_is_skipped_aloud(
        self, toy: Toy, caplog: pytest.LogCaptureFixture
    ) -> None:
        toy.serve("torch", 1, requires=[Requirement.cuda()])
        toy.serve("triton", 3)
        with caplog.at_level(logging.INFO, "torch_ops"):
            assert [toy() for _ in range(3)] == [3, 3, 3]
        events = [r.getMessage() for r in caplog.records if "degraded" in r.getMessage()]
        assert events == ["degraded: op 'toy' skips backend 'torch': CUDA only (device is 'cpu')"]
        first = torch_ops.explain("toy").candidates[0]
        assert (first.backend, first.reasons) == (Backend.TORCH, ("CUDA only (device is 'cpu')",))

    def test_15_flaggems_1073_contexts_leave_nothing_behind(
        self, toy: Toy, recwarn: pytest.WarningsRecorder
    ) -> None:
        """A hundred scopes, nested and left by exceptions: the dispatcher's tables are the same."""
        toy.serve("torch", 1)
        toy.serve("triton", 3)

        def table() -> list[str]:
            names = ("toy", "toy.backend", "rms_norm")
            return [torch._C._dispatch_dump_table(f"torch_ops::{name}") for name in names]

        def once() -> None:
            with torch_ops.use_backend("triton"), torch_ops.use_backend(toy="torch"):
                toy()
                raise ZeroDivisionError

        before = table()
        for _ in range(100):
            with pytest.raises(ZeroDivisionError):
                once()
        assert table() == before
        assert policy.current_scope() is None
        assert not recwarn.list

    def test_17_vllm_27178_toggles_stay_compiled(self, toy: Toy) -> None:
        """12 functions compiled one by one, 20 changes: two graphs each, and never eager code."""
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        class Layer(torch.nn.Module):
            def forward(self, x: Tensor) -> Any:
                return ops.toy(x)

        layers = [torch.compile(Layer(), backend=counter, fullgraph=True) for _ in range(12)]
        x = torch.ones(2)
        for index in range(20):
            name, value = (("torch", 1), ("triton", 3))[index % 2]
            with torch_ops.use_backend(name):
                assert all(bool(layer(x).eq(value).all()) for layer in layers)
        assert counter.frame_count <= 2 * len(layers)

    @pytest.mark.slow
    def test_18_pytorch_187319_and_19_pytorch_160472_caches_know_the_schema_and_the_fake(
        self, python: Python, tmp_path: Path
    ) -> None:
        """An op that is corrected finds no artifact of what it was; an unchanged one does."""
        outcomes = [
            python(CACHED, VARIANT=variant, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
            for variant in ("wrong", "right", "right")
        ]
        wrong, right, again = (outcome.split() for outcome in outcomes)
        assert wrong[:2] == ["[[0.0,0.0]]", "AssertionError"], "the planted faults have to show"
        assert right[:2] == again[:2] == ["[[2.0,2.0]]", "[[3.0,3.0]]"]
        assert (right[2], again[2]) == ("hits=0", "hits=2")

    def test_21_pytorch_182006_an_output_that_is_an_input(self, toy: Toy) -> None:
        """Found for that backend even where the other ones copy."""
        toy.serve("torch", 1)
        toy.serve("triton", 3, kernel=lambda x, n: x)
        operator = torch.ops.torch_ops.toy.backend
        torch.library.opcheck(operator, (torch.ones(2), 1, "torch"))
        with pytest.raises(Exception, match="alias"):
            torch.library.opcheck(operator, (torch.ones(2), 1, "triton"))
        with torch_ops.debug(), pytest.raises(DeclarationError, match="output 0 shares memory"):
            toy("triton")

    @pytest.mark.usefixtures("declaring")
    def test_22_sglang_19725_a_fake_without_the_default(self) -> None:
        @declare.op(contract=Contract())
        def case_22(x: Tensor, eps: float = 1e-5) -> Tensor:
            return x + eps

        for wrong in (lambda x, eps: x, lambda x, eps=1e-6: x, lambda x, epsilon=1e-5: x):
            with pytest.raises(DeclarationError, match=r"eps: 'float' = 1e-05.*Received: fake\(x"):
                case_22.fake(wrong)

    @pytest.mark.usefixtures("declaring")
    def test_23_pytorch_185659_annotations_of_a_function_scope(self) -> None:
        """This module has future annotations; the names below exist in this function alone."""
        from torch import Tensor as Here

        @declare.op(contract=Contract())
        def case_23(x: Here, y: Here | None = None) -> Here:
            return x.clone()

        assert case_23.schema == "(Tensor x, Tensor? y=None) -> Tensor"
        with pytest.raises(DeclarationError, match=r"return type .*Tensor \| None has no place in"):

            @declare.op(contract=Contract())
            def case_23_optional(x: Here) -> Here | None:
                return x

    def test_25_pytorch_62032_gradients_are_never_lost(self) -> None:
        """At the call, not at ``backward``; in compiled code, too."""
        x = torch.randn(3, 8, requires_grad=True)
        least = torch.zeros(3)
        compiled, _ = counted(ops.min_p_filter)
        for backend in (None, "torch", "inductor"):
            with pytest.raises(NoBackwardError, match="requires grad and no backend of the op has"):
                ops.min_p_filter(x, least, backend=backend)
        text = "requires grad and no backend of the op has a backward"
        with pytest.raises(Exception, match=text):
            compiled(x, least)
        with torch.no_grad():
            assert not compiled(x, least).requires_grad

    def test_26_flashinfer_2733_kernels_that_build_at_their_first_call(
        self, toy: Toy, tmp_path: Path
    ) -> None:
        """Dynamo never reaches what a kernel does with files; cold, in one graph."""
        seen: list[type] = []

        def build(x: Tensor, n: int) -> Tensor:
            seen.append(type(x))
            (tmp_path / "built").touch()
            assert (tmp_path / "built").stat().st_mode
            return torch.full_like(x, 7)

        toy.serve("torch", 1, kernel=build)
        compiled, counter = counted(torch.ops.torch_ops.toy)
        assert compiled(torch.ones(2)).eq(7).all()
        assert compiled(torch.ones(2)).eq(7).all()
        assert counter.frame_count == 1
        assert set(seen) == {Tensor}

    def test_27_pytorch_194007_the_scope_of_the_call_runs(self, install: Install) -> None:
        """Compiled under one choice and called under another: the kernel of the call runs."""
        install("acme")
        x = torch.randn(3, 8)
        compiled, counter = counted(ops.silu_and_mul)
        with torch_ops.use_backend("torch"):
            assert "aten::silu" in ran(lambda: compiled(x))
        with torch_ops.use_backend("acme"):
            names = ran(lambda: compiled(x))
        assert "aten::sigmoid" in names
        assert "aten::silu" not in names
        made = counter.frame_count
        with torch_ops.use_backend("torch"):
            assert "aten::silu" in ran(lambda: compiled(x))
        assert counter.frame_count == made == 2

        def inside(x: Tensor) -> Any:
            with torch_ops.use_backend("torch"):
                return ops.silu_and_mul(x)

        compiled, _ = counted(inside)
        with pytest.raises(Exception, match="pass backend= to the call instead"):
            compiled(x)

    def test_30_kernels_674_rocm_is_not_cuda(self, install: Install) -> None:
        """Refused with the reason and never imported; gfx names are compared whole."""
        install("absent")
        torch_ops.register_kernel(
            KernelSpec("loose", "flashinfer", "no_such_flashinfer:f", [Requirement.cuda()])
        )
        torch_ops.register_kernel(
            KernelSpec("loose", "aiter", "math:sqrt", [Requirement.rocm(["gfx1030"])])
        )
        near, far = Platform.rocm("gfx1030"), Platform.rocm("gfx1032")
        assert torch_ops.select_kernel("loose", platform=near).backend is Backend.AITER
        with pytest.raises(NoBackendError) as raised:
            torch_ops.select_kernel("loose", platform=far)
        assert "flashinfer  CUDA only (device is 'rocm')" in str(raised.value)
        assert "aiter  arch gfx1032 (supported: gfx1030)" in str(raised.value)
        assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
        assert "no_such_flashinfer" not in sys.modules
        assert "torch_ops_absent.rms_norm" not in sys.modules

    def test_31_vllm_48324_mixed_dtypes_are_refused_by_name_or_right(
        self, install: Install
    ) -> None:
        install("acme")
        weight = torch.randn(8, dtype=torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(3, 8, dtype=dtype)
            with pytest.raises(BackendUnavailableError) as raised:
                ops.rms_norm(x, weight, backend="acme")
            assert "torch.float32" in raised.value.reasons[0]
            assert str(dtype) in raised.value.reasons[0]
            expected = ops.rms_norm(x.float(), weight).to(dtype)
            assert torch.equal(ops.rms_norm(x, weight), expected)

    def test_33_sglang_33645_outputs_are_alike_however_they_are_made(self) -> None:
        """Number, dtype, shape and strides: eager and compiled, backend by backend."""
        x = torch.randn(4, 3, 8, dtype=torch.bfloat16).transpose(0, 1)
        weight = torch.randn(8, dtype=torch.bfloat16)
        seen = set()
        for backend in ("torch", "inductor"):
            for outer in (None, "aot_eager"):
                torch._dynamo.reset()

                def call(x: Tensor, name: str = backend) -> Any:
                    return ops.fused_add_rms_norm(x, x, weight, backend=name)

                made: Any = call if outer is None else torch.compile(call, backend=outer)
                found = made(x)
                kinds = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in found]
                seen.add((type(found), *kinds))
        assert seen == {(tuple, *[(torch.bfloat16, (3, 4, 8), (32, 8, 1), 0)] * 2)}

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_34_pytorch_134581_packages_of_compiled_programs(
        self, python: Python, tmp_path: Path
    ) -> None:
        """``import torch_ops`` is what a process needs to load one; without it the op is named."""

        class Norm(torch.nn.Module):
            def forward(self, x: Tensor) -> Any:
                return torch.ops.torch_ops.rms_norm(x)

        x, path = torch.ones(2, 8), str(tmp_path / "norm.pt2")
        exported = torch.export.export(Norm(), (x,))
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
        out = python(
            f"""
            import torch
            def load():
                return torch._inductor.aoti_load_package({path!r})(torch.ones(2, 8))
            try:
                load()
            except RuntimeError as error:
                print(str(error).splitlines()[0])
            import torch_ops
            print(torch.equal(load(), torch_ops.ops.rms_norm(torch.ones(2, 8))))
            """
        )
        first, second = out.splitlines()
        assert "Could not find schema for torch_ops::rms_norm" in first
        assert second == "True"


CACHED = """
import json, os, torch, torch_ops
from torch import Tensor
from torch._dynamo.utils import counters
from torch_ops import declare, ops
from torch_ops.contracts import Contract

right = os.environ["VARIANT"] == "right"

@declare.op(contract=Contract(), mutates=("x",) if right else ("y",))
def case_18(x: Tensor, y: Tensor) -> None:
    x.add_(2)

@declare.op(contract=Contract())
def case_19(x: Tensor) -> Tensor:
    return x + 3

@case_19.fake
def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape if right else x.shape[::-1])

class kernels:
    pass

for declaration in (case_18, case_19):
    setattr(kernels, declaration.name, staticmethod(declaration.reference))
    torch_ops.register_kernel(torch_ops.KernelSpec(
        declaration.name, "torch", f"__main__:kernels.{declaration.name}"))

def write(x):  # no generated kernel in either graph: nothing is to be built
    torch.ops.torch_ops.case_18(x, ops.rms_norm(x))
    return x

def convert(x):
    return torch.ops.torch_ops.case_19(x)

with torch.no_grad():
    for function in (write, convert):
        try:
            out = torch.compile(function, fullgraph=True)(torch.zeros(1, 2))
            print(json.dumps(out.tolist(), separators=(",", ":")))
        except AssertionError as error:
            print("AssertionError")
print(f"hits={counters['inductor']['fxgraph_cache_hit']}")
"""


class TestRegistry:
    """Kernel registry: the rows that concern ops, registry and policy."""

    def test_01_39755_lazy_kernels_compile_cold_and_warm(self, toy: Toy) -> None:
        toy.serve("torch", 1)

        def wrapper(x: Tensor) -> Any:
            return ops.toy(x + 1) + 1

        compiled, counter = counted(wrapper)
        assert compiled(torch.ones(2)).eq(2).all()
        torch_ops.warmup("toy", torch.ones(2))
        assert compiled(torch.ones(2)).eq(2).all()
        assert counter.frame_count == 1

    def test_02_34389_defaults_fall_back_and_explicit_choices_do_not(self, toy: Toy) -> None:
        toy.serve(
            "torch", 1, supports=lambda x, n: "n is odd (supported: even n)" if n % 2 else None
        )
        toy.serve("inductor", 2)
        with torch_ops.trace() as seen:
            assert toy(n=1) == 2
        assert seen.records[0].skipped == (("torch", "n is odd (supported: even n)"),)
        for scope in (torch_ops.use_backend("torch"), torch_ops.use_backend(toy="torch")):
            with scope, pytest.raises(BackendUnavailableError, match="n is odd"):
                toy(n=1)

    def test_03_36907_an_error_inside_a_scope_is_not_masked(self, toy: Toy) -> None:
        """A scope that nothing used is no error here; what is raised in it is what arrives."""
        toy.serve("torch", 1)
        with torch_ops.use_backend("torch"):
            pass
        with pytest.raises(ZeroDivisionError), torch_ops.use_backend("torch"):
            _ = 1 / 0

    def test_05_16325_the_environment_is_not_dead_code(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install("acme")
        x = torch.randn(3, 8)
        monkeypatch.setenv("TORCH_OPS_BACKEND", "silu_and_mul=acme")
        torch_ops.refresh()
        assert "aten::sigmoid" in ran(lambda: ops.silu_and_mul(x))
        explained = torch_ops.explain("silu_and_mul", x)
        assert (str(explained.chosen), explained.source) == ("acme", "environment")

    def test_06_39882_tuning_never_changes_an_explicit_choice(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in (("torch", 1), ("inductor", 2), ("triton", 3)):
            toy.serve(name, value)
        undo = torch_ops.set_backend(toy="triton")
        monkeypatch.setitem(policy.tuned, ("cpu", None, "toy"), Backend.INDUCTOR)
        policy.invalidate()
        assert toy() == 3
        with torch_ops.use_backend("torch"):
            assert toy() == 1
        assert toy("torch") == 1
        undo()
        assert toy() == 2

    def test_07_38689_each_option_runs_another_kernel(self, install: Install) -> None:
        install("acme")
        x, weight = torch.randn(3, 8), torch.randn(8)

        def marks(name: str) -> set[str]:
            known = {"aten::mean", "aten::linalg_vector_norm"}
            names = ran(lambda: ops.rms_norm(x, weight, backend=name))
            return {key for key in names if key in known or "CompiledFxGraph" in key}

        kernels = {name: marks(name) for name in ("torch", "inductor", "acme")}
        assert kernels["torch"] == {"aten::mean"}
        assert kernels["acme"] == {"aten::linalg_vector_norm"}
        assert ["CompiledFxGraph" in key for key in kernels["inductor"]] == [True]

    def test_11_31849_predicates_never_see_symbols(self, toy: Toy) -> None:
        seen: list[type] = []

        def predicate(x: Tensor, n: int) -> str | None:
            seen.append(type(x.shape[0]))
            return "many rows" if x.shape[0] > 4 else None

        toy.serve("torch", 1, supports=predicate)
        toy.serve("inductor", 2)
        torch._dynamo.reset()
        compiled: Any = torch.compile(ops.toy, backend="aot_eager", fullgraph=True, dynamic=True)
        assert [float(compiled(torch.ones(rows, 7))[0, 0]) for rows in (3, 9, 4)] == [1, 2, 1]
        assert set(seen) == {int}

    @pytest.mark.usefixtures("declaring")
    def test_13_9564_the_same_op_twice(self) -> None:
        """The same declaration is a no-op; another one is loud, and the first one stays."""

        def make() -> declare.Declaration:
            @declare.op(contract=Contract())
            def case_13(x: Tensor) -> Tensor:
                return x * 2

            return case_13

        def make_another() -> declare.Declaration:
            @declare.op(contract=Contract())
            def case_13(x: Tensor) -> Tensor:
                return x * 3

            return case_13

        first = make()
        assert make() is first
        with pytest.raises(DeclarationError, match=r"'case_13' is declared differently.*The first"):
            make_another()
        assert catalogue()["case_13"] is first

    def test_14_12119_the_reason_has_the_type_and_text_of_the_import_error(
        self, install: Install
    ) -> None:
        install("crooked", "broken")
        x = torch.randn(3, 8)
        with pytest.raises(BackendUnavailableError, match="OSError: crooked was built for another"):
            ops.gemma_rms_norm(x, torch.randn(8), backend="crooked")
        with pytest.raises(BackendUnavailableError, match=r"ImportError: libbroken\.so\.7: cannot"):
            ops.rms_norm(x, backend="broken")
        assert ops.rms_norm(x, backend="torch").shape == x.shape

    def test_15_30777_one_op_of_one_backend_can_be_denied(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toy.serve("torch", 1)
        toy.serve("inductor", 2)
        monkeypatch.setenv("TORCH_OPS_DISABLE", "toy:torch")
        torch_ops.refresh()
        assert toy() == 2
        assert torch_ops.explain("rms_norm", torch.ones(2, 4)).chosen is Backend.TORCH
        others = ",".join(b.value for b in Backend if b is not Backend.TORCH)
        monkeypatch.setenv("TORCH_OPS_DISABLE", others)
        torch_ops.refresh()
        assert toy() == 1
        with pytest.raises(BackendUnavailableError, match="disabled by TORCH_OPS_DISABLE=inductor"):
            toy("inductor")

    @pytest.mark.parametrize("op", sorted(catalogue()))
    def test_17_10207_the_switch_is_honored_by_every_op(
        self, op: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("inductor", "torch"):
            if not any(spec.backend.value == name for spec in torch_ops.registry.get(op)):
                continue
            monkeypatch.setenv("TORCH_OPS_DISABLE", name)
            torch_ops.refresh()
            with pytest.raises(BackendUnavailableError) as raised:
                torch_ops.select_kernel(op, name, platform=CPU)
            assert raised.value.reasons[0] == f"disabled by TORCH_OPS_DISABLE={name}"
        monkeypatch.setenv("TORCH_OPS_DISABLE", "inductor")
        torch_ops.refresh()
        assert torch_ops.select_kernel(op, platform=CPU).backend is Backend.TORCH

    def test_18_10602_absent_packages_break_nothing(self, python: Python) -> None:
        out = python(
            """
            import sys
            for name in ("sgl_kernel", "flashinfer", "cutlass", "triton"):
                sys.modules[name] = None
            import torch, torch_ops
            print(torch_ops.explain("rms_norm").chosen, torch_ops.registry.ops() != [],
                  torch_ops.ops.rms_norm(torch.ones(2, 4), backend="torch").shape)
            """
        )
        assert out.strip() == "torch True torch.Size([2, 4])"

    def test_19_18507_cpu_tensors_on_an_op_for_gpus(self, toy: Toy) -> None:
        toy.serve("flashinfer", 4, requires=[Requirement.cuda((8, 0))])
        toy.serve("triton", 3, requires=[Requirement.cuda(), Requirement.rocm()])
        with pytest.raises(NoBackendError) as raised:
            toy()
        message = str(raised.value)
        assert message.startswith("op 'toy' has no backend usable on device 'cpu'")
        assert "triton  CUDA or ROCm only (device is 'cpu')" in message
        assert "flashinfer  CUDA only (device is 'cpu')" in message

    def test_21_13469_batches_and_flips_cost_few_graphs(self, toy: Toy) -> None:
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        compiled, counter = counted(ops.toy)
        for rows in range(2, 52):
            assert compiled(torch.ones(rows)).eq(1).all()
        assert counter.frame_count <= 2
        before = counter.frame_count
        for _ in range(10):
            with torch_ops.use_backend("triton"):
                assert compiled(torch.ones(9)).eq(3).all()
            assert compiled(torch.ones(8)).eq(1).all()
        assert counter.frame_count <= before + 1

    def test_25_32358_what_ran_has_a_name_in_eager_and_compiled_code(self, toy: Toy) -> None:
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        compiled, _ = counted(ops.toy)
        for call in (ops.toy, compiled):
            with torch_ops.trace() as seen:
                call(torch.ones(2))
                with torch_ops.use_backend("triton"):
                    call(torch.ones(2))
            assert [(r.backend, r.source, r.count) for r in seen.records] == [
                (Backend.TORCH, "declared", 1),
                (Backend.TRITON, "scope", 1),
            ]

    def test_26_39947_a_change_after_the_first_run_is_not_ignored(self, toy: Toy) -> None:
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        compiled, _ = counted(ops.toy)
        assert compiled(torch.ones(2)).eq(1).all()
        torch_ops.set_backend(toy="triton")
        assert compiled(torch.ones(2)).eq(3).all()

    @pytest.mark.parametrize("name", ["torch", "inductor"])
    def test_27_36823_inputs_change_only_where_the_schema_says_so(self, name: str) -> None:
        x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
        before = [x.clone(), residual.clone(), weight.clone()]
        out, total = ops.fused_add_rms_norm(x, residual, weight, backend=name)
        for tensor, copy in zip((x, residual, weight), before, strict=True):
            assert torch.equal(tensor, copy)
        ops.fused_add_rms_norm_(x, residual, weight, backend=name)
        assert torch.equal(x, out)
        assert torch.equal(residual, total)
        assert torch.equal(weight, before[2])

    def test_29_182328_strides_of_the_fake_are_those_of_the_kernel(self) -> None:
        x = torch.randn(4, 3, 8).transpose(0, 1)
        for name in ("torch", "inductor"):
            torch.library.opcheck(torch.ops.torch_ops.rms_norm.backend, (x, None, 1e-6, name))
            assert ops.rms_norm(x, backend=name).stride() == (32, 8, 1)

    def test_30_1373_no_backward_is_an_error_at_the_call(self) -> None:
        probs, least = torch.rand(3, 8), torch.zeros(3, requires_grad=True)
        with pytest.raises(NoBackwardError, match="op 'min_p_filter': an input requires grad"):
            ops.min_p_filter(probs, least)

    def test_34_487_a_write_that_the_schema_does_not_tell(self, toy: Toy) -> None:
        """Found for every backend by PyTorch's check, which the suite runs on each."""
        toy.serve("torch", 1)
        toy.serve("triton", 3, kernel=lambda x, n: x.add_(1).clone())
        operator = torch.ops.torch_ops.toy.backend
        torch.library.opcheck(operator, (torch.ones(2), 1, "torch"))
        with pytest.raises(Exception, match="mutat"):
            torch.library.opcheck(operator, (torch.ones(2), 1, "triton"))

    def test_37_4062_many_threads_call_first_and_one_loads(self, toy: Toy) -> None:
        """In a cold process, with a slow import: tests/core/test_processes.py."""
        toy.serve("torch", 1)
        toy.serve("triton", 3)
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda i: toy("triton" if i % 2 else None), range(160)))
        assert found == [1.0, 3.0] * 80
        assert toy.calls == {"torch": 80, "triton": 80}

    def test_38_1362_what_is_used_can_be_asked_in_one_line(self) -> None:
        line = str(torch_ops.explain("rms_norm", torch.ones(2, 4))).splitlines()[0]
        assert line == f"rms_norm on {CPU}: torch (declared)"
