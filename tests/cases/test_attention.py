"""Reports about attention layers and overrides of other projects, each with the right outcome here.

A test names the report that it comes from. What was wrong there can't happen here.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import torch_ops
from torch_ops import policy
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    apply_attention_backend_override,
    attention_state,
    override_attention_backend,
)
from torch_ops.attention.choice import ORDER, LayerRules, refusals
from torch_ops.attention.prepared import Place, PreparedAttention

REFUSED = torch_ops.AttentionOverrideError
UNAVAILABLE = torch_ops.BackendUnavailableError
KERNELS = "torch_ops.backends.torch.attention"
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


class Stack(nn.Module):
    """Layers one after the other, each with a residual connection."""

    def __init__(self, count: int = 3, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Attention(4, 8, 2, is_causal=True, **options) for _ in range(count)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = q + layer(q, k, v)
        return q


def inputs(batch: int = 2, queries: int = 3, keys: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + queries * 100 + keys)
    shapes = ((batch, queries, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 8))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def ran(call: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Which families ran in a call, who chose them, and how often."""
    with torch_ops.trace() as trace:
        call()
    return [(r.backend.value, r.source, r.count) for r in trace.records if r.op == "attention"]


def layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


class TestSelection:
    """Selection, override, registration, compile."""

    def test_01_vllm_50292_environment_is_not_ignored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = Attention(4, 8, 2, backend="torch_math")
        monkeypatch.setenv("TORCH_OPS_BACKNED", "torch")
        torch_ops.refresh()
        with pytest.raises(torch_ops.UnknownVariableError, match="mean 'TORCH_OPS_BACKEND'"):
            layer(*inputs())
        monkeypatch.delenv("TORCH_OPS_BACKNED")
        monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=nope")
        torch_ops.refresh()
        with pytest.raises(torch_ops.UnknownVariableError, match=r"'nope' .*Known: .*'inductor'"):
            layer(*inputs())
        monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=torch")
        torch_ops.refresh()
        assert ran(lambda: layer(*inputs())) == [("torch_math", "environment", 1)]

    def test_02_vllm_22738_no_choice_outlives_a_change(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = Attention(4, 8, 2)

        def choice() -> str:
            ((family, _, _),) = ran(lambda: layer(*inputs()))
            assert layer.backend == family
            return family

        assert choice() == "torch_flash"
        monkeypatch.setitem(ORDER, "cpu", ("torch_math", "torch_flash"))
        torch_ops.refresh()
        assert choice() == "torch_math"
        monkeypatch.setattr(sys.modules[KERNELS], "supports", lambda s, d, t, b: f"not {b}")
        torch_ops.refresh()
        with pytest.raises(torch_ops.NoBackendError, match="not torch_math"):
            choice()

    def test_03_vllm_53450_drafter_follows_or_the_call_raises(self) -> None:
        target = nn.ModuleDict({"target": Stack(), "draft": Stack(2)})
        override_attention_backend(target, "torch_math")
        assert {layer.backend.value for layer in layers(target)} == {"torch_math"}
        target["draft"] = Stack(2, logits_soft_cap=30.0)
        before = attention_state(target)
        with pytest.raises(REFUSED, match=r"draft\.layers\.0  logits_soft_cap 30") as error:
            override_attention_backend(target, "torch_flash")
        assert set(error.value.refused) == {"draft.layers.0", "draft.layers.1"}
        assert attention_state(target) == before

    def test_05_diffusers_14249_overrides_do_not_leak(self) -> None:
        a, b, fresh = Stack(), Stack(), attention_state(Stack())
        states: list[str] = []

        def look() -> None:
            states.extend([attention_state(b), attention_state(Stack())])

        async def task() -> None:
            look()

        token = override_attention_backend(a, "torch_math")
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        asyncio.run(task())
        assert states == [fresh] * 6
        token.undo()
        assert attention_state(a) == fresh

    def test_06_diffusers_13284_a_failing_prepare_is_told_when_it_is_set(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = Attention(4, 8, 2)
        out = layer(*inputs())
        monkeypatch.setattr(
            sys.modules[KERNELS], "prepare", lambda *_: (_ for _ in ()).throw(OSError("no hub"))
        )
        with pytest.raises(REFUSED, match="OSError: no hub"):
            apply_attention_backend_override(layer, "torch_math")
        assert layer.backend is AttentionBackend.TORCH_FLASH
        assert torch.equal(layer(*inputs()), out)

    @pytest.mark.parametrize("option", [{"logits_soft_cap": 5.0}, {"window_left": 1}])
    def test_07_diffusers_12605_no_argument_is_dropped(self, option: dict[str, Any]) -> None:
        """Served right, or skipped with the reason, or refused; never computed without it."""
        plain = Attention(4, 8, 2, is_causal=True)(*inputs())
        for family in ("torch_flash", "torch_math"):
            layer = Attention(4, 8, 2, is_causal=True, backend=family, **option)
            try:
                out = layer(*inputs())
            except UNAVAILABLE as error:
                (reason,) = error.reasons
                assert next(iter(option)) in reason
            else:
                assert not torch.allclose(out, plain)

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))]
    )
    def test_09_transformers_39423_copies_are_independent(
        self, duplicate: Callable[[nn.Module], nn.Module]
    ) -> None:
        layer = Attention(4, 8, 2)
        before = attention_state(layer)
        override_attention_backend(duplicate(layer), "torch_math")
        assert attention_state(layer) == before
        model = nn.ModuleList([Stack(), Stack(1, supported_backends=["torch_flash"])])
        before = attention_state(model)
        with pytest.raises(REFUSED):
            override_attention_backend(model, "torch_math")
        assert attention_state(model) == before

    def test_10_transformers_46755_an_empty_override_is_an_error(self) -> None:
        for model, total in ((nn.Linear(2, 2), 0), (Stack(), 3)):
            with pytest.raises(REFUSED, match=f"0 of {total} layers changed"):
                override_attention_backend(model, "torch_math", where="encoder.*")
            report = override_attention_backend(
                model, "torch_math", where="encoder.*", allow_noop=True
            ).report
            assert report.switched == ()

    def test_11_tileops_1841_families_of_other_platforms_are_merely_ineligible(self) -> None:
        layer = Attention(4, 8, 2, supported_backends=list(AttentionBackend))
        assert layer.backend is AttentionBackend.TORCH_FLASH
        here = Place(torch.device("cpu"), torch.float32)
        reasons = {m: refusals(layer._rules, m, here) for m in AttentionBackend}
        assert reasons[AttentionBackend.TORCH_CUDNN] == ("device cpu (supported: cuda)",)
        assert all(reasons[AttentionBackend(m)] for m in ("flashinfer_fa3", "aiter", "triton"))
        assert not reasons[AttentionBackend.TORCH_MATH]

    def test_15_flaggems_1073_contexts_leave_nothing_behind(self) -> None:
        model = Stack()
        dispatcher = torch._C._dispatch_dump("torch_ops::_attention_layer")
        libraries = set(torch.library._impls)
        state = attention_state(model)
        for turn in range(100):
            outer = override_attention_backend(model, "torch_math")
            with outer, torch_ops.use_backend("torch"):
                inner = override_attention_backend(model, "torch_flash", where="layers.[01]")
                if turn % 2:
                    with pytest.raises(ZeroDivisionError), inner:
                        _ = 1 / 0
                else:
                    inner.undo()
        assert attention_state(model) == state
        assert torch._C._dispatch_dump("torch_ops::_attention_layer") == dispatcher
        assert set(torch.library._impls) == libraries
        (group,) = {layer._group for layer in layers(model)}
        assert len(group._routes) == 3

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_17_vllm_27178_twenty_toggles_stay_compiled(self) -> None:
        model = Stack(12)
        whole, single = CompileCounter(), CompileCounter()
        compiled: Any = torch.compile(model, backend=whole, fullgraph=True)
        apart = [torch.compile(x, backend=single, fullgraph=True) for x in layers(model)]
        q, k, v = inputs()
        for turn in range(20):
            family = ("torch_math", "torch_flash")[turn % 2]
            override_attention_backend(model, family)
            assert ran(lambda: compiled(q, k, v)) == [(family, "layer", 12)]
            assert ran(lambda: [x(q, k, v) for x in apart]) == [(family, "layer", 12)]
        assert whole.frame_count == 1
        assert single.frame_count <= 2

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_25_pytorch_62032_gradients_are_never_lost(self) -> None:
        layer = Attention(4, 8, 2)
        compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for family in ("torch_math", "torch_flash"):
            apply_attention_backend_override(layer, family)
            for call in (layer, compiled):
                q, k, v = inputs()
                with pytest.raises(Exception, match="layers have no backward"):
                    call(q.requires_grad_(), k, v)

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_27_pytorch_194007_the_override_of_the_call_runs(self) -> None:
        model = Attention(4, 8, 2)
        override_attention_backend(model, "torch_math")
        counters.clear()
        compiled: Any = torch.compile(model, fullgraph=True)
        assert ran(lambda: compiled(*inputs())) == [("torch_math", "layer", 1)]
        override_attention_backend(model, "torch_flash")
        assert ran(lambda: compiled(*inputs())) == [("torch_flash", "layer", 1)]
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["aot_autograd"]["autograd_cache_bypass"]

        def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            override_attention_backend(model, "torch_math")
            out: Tensor = model(q, k, v)
            return out

        with pytest.raises(Exception, match="can't happen inside code that torch"):
            torch.compile(inside, backend="eager", fullgraph=True)(*inputs())
        assert model.backend is AttentionBackend.TORCH_FLASH

    def test_30_kernels_674_rocm_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tensor of a ROCm build has device type cuda; families of NVIDIA are refused there."""

        properties = SimpleNamespace(
            name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-"
        )
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        torch_ops.refresh()
        rules = LayerRules(Attention(4, 64).spec)
        there = Place(torch.device("cuda", 0), torch.bfloat16)
        (reason,) = refusals(rules, AttentionBackend.TORCH_CUDNN, there)
        assert reason == "cuDNN needs an NVIDIA GPU"
        for family in ("flashinfer_fa2", "flashinfer_fa3"):
            assert family not in ORDER["rocm"]
            assert refusals(rules, AttentionBackend(family), there)
        assert "flashinfer" not in sys.modules
        assert not refusals(rules, AttentionBackend.TORCH_FLASH, there)
        assert Attention(4, 64).backend is AttentionBackend.TORCH_FLASH
        monkeypatch.undo()
        torch_ops.refresh()

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_33_sglang_33645_outputs_are_alike_however_they_are_made(self) -> None:
        layer = Attention(4, 8, 2)
        compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for family in ("torch_math", "torch_flash"):
            apply_attention_backend_override(layer, family)
            for call in (inputs(), inputs(queries=1), inputs(queries=0), inputs(keys=0)):
                seen = (layer(*call), compiled(*call))
                kinds = {(type(o), o.dtype, o.shape, o.stride(), o.device) for o in seen}
                assert len(kinds) == 1


class TestRegistryAndLayers:
    """Kernel registry and attention layers."""

    def test_01_39755_a_layer_compiles_cold_and_warm(self, tmp_path: Path) -> None:
        script = """
        import torch
        from torch._dynamo.utils import counters
        from torch_ops.attention import Attention
        layer = Attention(4, 8)
        x = torch.randn(2, 3, 4, 8)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        first = compiled(x, x, x)
        assert torch.equal(first, compiled(x, x, x)) and torch.equal(first, layer(x, x, x))
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        """
        python(script, tmp_path)

    def test_02_34389_defaults_fall_back_and_explicit_choices_do_not(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def supports(spec: object, device: object, dtype: object, member: object) -> str | None:
            return "head_dim 8 (supported: 512)" if member == "torch_flash" else None

        monkeypatch.setattr(sys.modules[KERNELS], "supports", supports)
        layer = Attention(4, 8, 2)
        with torch_ops.trace() as trace, caplog.at_level(logging.INFO, "torch_ops"):
            layer(*inputs())
        (record,) = trace.records
        assert (record.backend, record.source) == (AttentionBackend.TORCH_MATH, "declared")
        assert record.skipped == (("torch_flash", "head_dim 8 (supported: 512)"),)
        assert "degraded: Attention skips backend 'torch_flash': head_dim 8" in caplog.text
        with pytest.raises(UNAVAILABLE, match="head_dim 8"):
            Attention(4, 8, 2, backend="torch_flash")(*inputs())
        with pytest.raises(REFUSED, match="head_dim 8"):
            override_attention_backend(layer, "torch_flash")

    def test_03_36907_an_error_inside_a_scope_is_not_masked(self) -> None:
        layer = Attention(4, 8, 2)
        with pytest.raises(KeyError, match="body"), torch_ops.use_backend("inductor"):
            raise KeyError("body")
        with torch_ops.use_backend("torch"):
            assert ran(lambda: layer(*inputs())) == [("torch_flash", "scope", 1)]
        assert ran(lambda: layer(*inputs())) == [("torch_flash", "declared", 1)]

    def test_05_16325_the_environment_is_not_dead_code(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = Attention(4, 8, 2, logits_soft_cap=30.0)
        monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=torch")
        torch_ops.refresh()
        with pytest.raises(UNAVAILABLE, match="chosen by environment, can't serve"):
            layer(*inputs())
        plain = Attention(4, 8, 2)
        assert ran(lambda: plain(*inputs())) == [("torch_flash", "environment", 1)]
        assert torch_ops.explain("attention").source == "environment"

    def test_06_39882_tuning_never_changes_an_explicit_choice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(policy.tuned, ("cpu", None, "attention"), torch_ops.Backend.INDUCTOR)
        torch_ops.refresh()
        required = Attention(4, 8, 2, required_backend="torch_math")
        built = Attention(4, 8, 2, backend="torch_math")
        overridden = Attention(4, 8, 2)
        apply_attention_backend_override(overridden, "torch_math")
        for layer in (required, built, overridden):
            assert ran(lambda: layer(*inputs())) == [("torch_math", "layer", 1)]  # noqa: B023
        assert Attention(4, 8, 2).backend is AttentionBackend.INDUCTOR
        monkeypatch.undo()
        torch_ops.refresh()

    def test_07_38689_each_option_changes_the_kernel(self) -> None:
        layer = Attention(4, 8, 2)
        seen = {}
        for family in ("torch_math", "torch_flash"):
            apply_attention_backend_override(layer, family)
            with torch.profiler.profile() as profiler:
                layer(*inputs())
            names = {event.key for event in profiler.key_averages()}
            seen[family] = {n for n in names if n.startswith("aten::_scaled_dot_product")}
        assert len(seen["torch_math"]) == len(seen["torch_flash"]) == 1
        assert seen["torch_math"].isdisjoint(seen["torch_flash"])

    def test_09_35310_overrides_by_role(self) -> None:
        model = nn.ModuleDict(
            {"self": Attention(4, 8, role="self"), "cross": Attention(4, 8, role="cross")}
        )
        override_attention_backend(model, "torch_math")
        override_attention_backend(model, "torch_flash", where=lambda n, x: x.role == "cross")
        assert [layer.backend.value for layer in layers(model)] == ["torch_math", "torch_flash"]
        with pytest.raises(REFUSED, match="0 of 2 layers changed"):
            override_attention_backend(model, "torch_flash", where=lambda n, x: x.role == "image")

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_11_31849_predicates_never_see_symbols(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels: Any = sys.modules[KERNELS]
        supports, seen = kernels.supports, []

        def recorded(spec: Any, device: Any, dtype: Any, member: Any) -> str | None:
            seen.extend(vars(spec).values())
            answer: str | None = supports(spec, device, dtype, member)
            return answer

        monkeypatch.setattr(kernels, "supports", recorded)
        compiled: Any = torch.compile(
            Attention(4, 8, 2), backend="aot_eager", fullgraph=True, dynamic=True
        )
        for batch in (2, 3, 7):
            compiled(*inputs(batch=batch))
        assert seen
        assert {type(value) for value in seen} <= {int, float, bool}

    def test_15_30777_one_op_of_one_backend_can_be_denied(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer, norm = Attention(4, 8, 2), torch.ops.torch_ops.rms_norm
        monkeypatch.setenv("TORCH_OPS_DISABLE", "attention:torch")
        torch_ops.refresh()
        assert layer.backend is AttentionBackend.INDUCTOR
        with torch_ops.trace() as trace:
            norm(torch.randn(2, 8))
        assert [record.backend.value for record in trace.records] == ["torch"]
        with (
            torch_ops.use_backend("torch"),
            pytest.raises(UNAVAILABLE, match="disabled by TORCH_OPS_DISABLE=attention:torch"),
        ):
            layer(*inputs())

    @pytest.mark.parametrize("family", ["torch_math", "torch_flash", "torch_cudnn", "inductor"])
    def test_17_10207_the_switch_is_honored_by_every_family(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_OPS_DISABLE", "torch,inductor")
        torch_ops.refresh()
        with pytest.raises(REFUSED, match="disabled by TORCH_OPS_DISABLE"):
            override_attention_backend(Attention(4, 8, 2), family)
        with pytest.raises(UNAVAILABLE, match="disabled by TORCH_OPS_DISABLE"):
            Attention(4, 8, 2, required_backend=family)(*inputs())

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_21_13469_batches_and_flips_compile_nothing(self) -> None:
        model, counter = Stack(2), CompileCounter()
        compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
        for turn in range(50):
            family = ("torch_math", "torch_flash")[turn // 10 % 2]
            if turn % 10 == 0:
                override_attention_backend(model, family)
            call = inputs(batch=2 + turn * 7 % 31)
            assert ran(lambda: compiled(*call)) == [(family, "layer", 2)]  # noqa: B023
        assert counter.frame_count <= 2

    def test_25_32358_what_ran_has_a_name_in_eager_and_compiled_code(self) -> None:
        layer = Attention(4, 8, 2)
        compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for family in ("torch_math", "torch_flash", "torch_math"):
            apply_attention_backend_override(layer, family)
            for call in (layer, compiled):
                assert ran(lambda: call(*inputs())) == [(family, "layer", 1)]  # noqa: B023

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_26_39947_a_change_after_the_first_run_is_not_ignored(self) -> None:
        model = Stack(2)
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(*inputs())
        undo = torch_ops.set_backend("torch")
        assert ran(lambda: compiled(*inputs())) == [("torch_flash", "process", 2)]
        undo()
        assert ran(lambda: compiled(*inputs())) == [("torch_flash", "declared", 2)]

    def test_27_36823_inputs_are_never_written(self) -> None:
        layer = Attention(4, 8, 2)
        for family in ("torch_math", "torch_flash"):
            apply_attention_backend_override(layer, family)
            call = inputs(queries=7)
            kept, versions = [x.clone() for x in call], [x._version for x in call]
            layer(*call)
            assert all(torch.equal(x, y) for x, y in zip(call, kept, strict=True))
            assert [x._version for x in call] == versions

    @pytest.mark.usefixtures("fresh_dynamo")
    def test_29_182328_strides_of_the_fake_are_those_of_the_kernel(self) -> None:
        layer = Attention(4, 8, 2)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
        for family in ("torch_math", "torch_flash"):
            apply_attention_backend_override(layer, family)
            for call in ((q, k, v), (q[:, :1], k, v)):
                fake = layer(*(x.to("meta") for x in call))
                real = layer(*call)
                assert (fake.shape, fake.stride(), fake.dtype) == (
                    real.shape,
                    real.stride(),
                    real.dtype,
                )

    def test_33_1173_no_rank_applies_what_another_cannot_prepare(self, tmp_path: Path) -> None:
        """Prepare and apply are two steps, so ranks can agree in between."""
        script = f"""
        import sys, torch, torch.distributed as dist, torch_ops
        from torch_ops.attention import *
        rank = int(sys.argv[1])
        dist.init_process_group(
            "gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2
        )
        layer = Attention(4, 8, logits_soft_cap=float(rank))  # one rank has another model
        before = attention_state(layer)
        for family, agreed in (("torch_math", 0), ("torch_cudnn", 0)):
            try:
                prepare_attention_backend_override(layer, family)
                ready = torch.ones(1)
            except torch_ops.AttentionOverrideError:
                ready = torch.zeros(1)
            dist.all_reduce(ready, dist.ReduceOp.MIN)
            assert ready.item() == agreed
            assert attention_state(layer) == before
        prepared = Attention(4, 8)
        prepare_attention_backend_override(prepared, "torch_math")
        dist.all_reduce(ready := torch.ones(1), dist.ReduceOp.MIN)
        apply_attention_backend_override(prepared, "torch_math")
        assert ready.item() == 1 and prepared.backend == "torch_math"
        dist.destroy_process_group()
        """
        ranks = [start(script, tmp_path, str(rank)) for rank in range(2)]
        for process in ranks:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors

    def test_37_4062_many_threads_call_first_and_one_prepares(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels: Any = sys.modules[KERNELS]
        prepare, prepared, started = kernels.prepare, [], threading.Barrier(16)

        def slow(spec: Any, device: Any, dtype: Any, member: Any) -> PreparedAttention:
            prepared.append(member)
            threading.Event().wait(0.05)
            made: PreparedAttention = prepare(spec, device, dtype, member)
            return made

        monkeypatch.setattr(kernels, "prepare", slow)
        layer, outputs = Attention(4, 8, 2), []

        def call() -> None:
            started.wait(30)
            outputs.append(layer(*inputs()))

        threads = [threading.Thread(target=call) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(prepared) == 1
        assert len(outputs) == 16
        assert all(torch.equal(out, outputs[0]) for out in outputs)

    def test_38_1362_what_is_used_can_be_asked_in_one_line(self) -> None:
        model = Stack(2)
        override_attention_backend(model, "torch_math", where="layers.0")
        assert [layer.backend.value for layer in layers(model)] == ["torch_math", "torch_flash"]
        assert "override=torch_math" in str(model)
        with torch_ops.trace() as trace:
            model(*inputs())
        assert "attention  torch_math   layer     1" in str(trace)


class TestNumerics:
    """What others computed wrong, on the CPU."""

    FAMILIES = ("torch_math", "torch_flash")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_t9_flash_attention_1778_rows_without_keys_are_zero(self, family: str) -> None:
        layer = Attention(4, 8, 2, is_causal=True, backend=family)
        for queries, keys in ((76, 1), (34, 1), (146, 1), (4, 2)):
            out = layer(*inputs(1, queries, keys))
            assert not out[:, : queries - keys].any()
            assert out.isfinite().all()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_t19_pytorch_187506_inner_strides(self, family: str) -> None:
        layer = Attention(4, 8, 2, backend=family)
        call = inputs()
        strided = [torch.stack([x, x + 1], -1)[..., 0] for x in call]
        assert torch.equal(layer(*strided), layer(*call))

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(24, 8), (40, 8), (28, 4), (24, 4), (32, 2)])
    def test_t21_flashinfer_258_groups_of_any_size(
        self, family: str, heads: int, kv_heads: int
    ) -> None:
        q, k, v = (torch.randn(1, 5, n, 16) for n in (heads, kv_heads, kv_heads))
        grouped = Attention(heads, 16, kv_heads, is_causal=True, backend=family)(q, k, v)
        repeated = [x.repeat_interleave(heads // kv_heads, 2).double() for x in (k, v)]
        exact = Attention(heads, 16, is_causal=True, backend="torch_math")(q.double(), *repeated)
        # The bound of float32 attention with the largest of each term: |o| <= A, P rounded to u.
        u, largest = 2**-24, float(v.abs().max())
        terms = float((q.abs().amax(1).amax(1) * k.abs().amax(1).amax(1)).sum()) / 4
        bound = largest * u * (2 + 2 * (4 + 2) * terms + 8 + 2 * 5**0.5)
        assert (grouped - exact).abs().max() <= bound

    @pytest.mark.parametrize("family", FAMILIES)
    def test_t30_transformers_39408_the_window_counts_keys_before_the_query(
        self, family: str
    ) -> None:
        """With V the identity the output is P; window_left=2 shows keys i-2 to i."""
        size = 8
        v = torch.eye(size).reshape(1, size, 1, size)
        q, k = torch.randn(2, 1, size, 1, size)
        layer = Attention(1, size, is_causal=True, window_left=2, backend=family)
        seen = layer(q, k, v)[0, :, 0] > 0
        place = torch.arange(size)
        distance = place.unsqueeze(1) - place
        assert torch.equal(seen, (distance >= 0) & (distance <= 2))


def start(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(script: str, folder: Path) -> None:
    process = start(script, folder)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
