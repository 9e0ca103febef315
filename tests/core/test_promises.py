"""What a policy requires of kernels: who promises it, who is refused, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_ops
from tests.attention import support
from torch_ops import (
    Backend,
    BackendUnavailableError,
    DeclarationError,
    KernelSpec,
    NoBackendError,
    UnknownVariableError,
    discovery,
    environment,
    ops,
    policy,
)
from torch_ops.attention import Attention, override_attention_backend
from torch_ops.contracts import PROMISES, Contract
from torch_ops.declarations import catalogue
from torch_ops.declare import op
from torch_ops.promises import package_of, promised
from torch_ops.registry import registry

from .conftest import Install

OP = "silu_and_mul"
X = torch.ones(3, 8)
State = Callable[..., None]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """Let the package of a backend state promises."""

    def say(backend: str, **promised: bool | frozenset[str]) -> None:
        package = dataclasses.replace(discovery.packages()[backend], promises=promised)
        monkeypatch.setitem(discovery.packages(), backend, package)
        policy.invalidate()

    yield say
    monkeypatch.undo()
    policy.invalidate()


def ran(call: Callable[[], object] = lambda: ops.silu_and_mul(X)) -> tuple[str, tuple[Any, ...]]:
    with torch_ops.trace() as seen:
        call()
    (record,) = seen.records
    return record.backend.value, record.skipped


def kept(backend: str, name: str = OP) -> Mapping[str, bool]:
    return promised(name, package_of(registry.find(name, backend)), "cuda")


def test_promises_are_those_of_contracts() -> None:
    assert PROMISES == ("deterministic", "batch_invariant")
    assert all(getattr(Contract(), name) in (True, False) for name in PROMISES)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_where_a_package_says_nothing_the_contract_does(name: str) -> None:
    contract = catalogue()[name].contract
    assert kept("torch", name) == {p: getattr(contract, p) for p in PROMISES}


@pytest.mark.parametrize("stated", [True, frozenset({OP})], ids=["all", "named"])
def test_a_requirement_skips_kernels_that_don_t_promise(
    stated: bool | frozenset[str], state: State
) -> None:
    state("inductor", batch_invariant=stated)
    assert ran()[0] == "torch"
    with torch_ops.use_backend(batch_invariant=True):
        backend, skipped = ran()
        explained = torch_ops.explain(OP, X)
    assert backend == "inductor"
    reason = (
        "promises deterministic, not batch_invariant, which use_backend requires; choose a "
        "backend that promises it, or drop the requirement"
    )
    assert ("torch", reason) in skipped
    assert explained.chosen is Backend.INDUCTOR
    assert explained.candidates[0].reasons == (reason,)
    assert ran()[0] == "torch"


def test_a_package_can_withdraw_what_the_contract_promises(state: State) -> None:
    state("torch", deterministic=False)
    assert kept("torch") == {"deterministic": False, "batch_invariant": False}
    with torch_ops.use_backend(deterministic=True):
        backend, skipped = ran()
    assert backend == "inductor"
    assert "promises nothing, not deterministic, which" in dict(skipped)["torch"]


@pytest.mark.parametrize("source", ["call", "scope", "process", "environment"])
def test_a_choice_that_doesn_t_promise_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "environment":
        monkeypatch.setenv("TORCH_OPS_BACKEND", "torch")
        torch_ops.refresh()
    if source == "process":
        torch_ops.set_backend("torch")
    scope = torch_ops.use_backend("torch" if source == "scope" else None, batch_invariant=True)
    backend = "torch" if source == "call" else None
    with scope, pytest.raises(BackendUnavailableError) as raised:
        ops.silu_and_mul(X, backend=backend)
    assert f"backend 'torch', chosen by {source}, is not usable here" in str(raised.value)
    (reason,) = raised.value.reasons
    assert reason.startswith("promises deterministic, not batch_invariant, which use_backend req")


def test_where_none_promises_nothing_runs() -> None:
    with torch_ops.use_backend(batch_invariant=True):
        with pytest.raises(NoBackendError, match="torch  promises deterministic, not batch_inv"):
            ops.rms_norm(X)
        with pytest.raises(NoBackendError, match="which use_backend requires"):
            torch_ops.select_kernel("rms_norm")
    assert ops.rms_norm(X).shape == X.shape


def test_requirements_of_nested_scopes_add_up(state: State) -> None:
    state("torch", batch_invariant=True, deterministic=False)
    state("inductor", batch_invariant=False, deterministic=True)
    with torch_ops.use_backend(batch_invariant=True):
        assert ran()[0] == "torch"
        for scope in (
            torch_ops.use_backend(),
            torch_ops.use_backend(batch_invariant=False),
            torch_ops.use_backend("torch"),
            torch_ops.debug(),
        ):
            with scope:
                assert ran()[0] == "torch"
        with (
            torch_ops.use_backend("inductor"),
            pytest.raises(BackendUnavailableError, match="not batch_invariant"),
        ):
            ops.silu_and_mul(X)
        with (
            torch_ops.use_backend(deterministic=True),
            pytest.raises(NoBackendError, match="not deterministic, which use_backend"),
        ):
            ops.silu_and_mul(X)
        assert ran()[0] == "torch"
    with torch_ops.use_backend(deterministic=True):
        assert ran()[0] == "inductor"


def test_one_scope_chooses_and_requires(state: State) -> None:
    state("inductor", batch_invariant=True)
    with torch_ops.use_backend("inductor", batch_invariant=True, rms_norm="torch"):
        assert ran()[0] == "inductor"
        with pytest.raises(BackendUnavailableError, match="'torch', chosen by scope"):
            ops.rms_norm(X)


def test_a_requirement_of_the_process(state: State) -> None:
    state("inductor", batch_invariant=True)
    undo = torch_ops.set_backend(batch_invariant=True)
    other = torch_ops.set_backend(batch_invariant=True)
    backend, skipped = ran()
    assert backend == "inductor"
    assert "which set_backend requires" in dict(skipped)["torch"]
    undo()
    assert ran()[0] == "inductor"
    torch_ops.set_backend(batch_invariant=False)
    assert ran()[0] == "inductor"
    other()
    assert ran()[0] == "torch"


def test_a_requirement_of_the_environment(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPS_REQUIRE", " deterministic, batch_invariant,")
    policy.forget_environment()
    state("inductor", batch_invariant=True)
    backend, skipped = ran()
    assert backend == "inductor"
    assert "which TORCH_OPS_REQUIRE requires" in dict(skipped)["torch"]
    monkeypatch.setenv("TORCH_OPS_REQUIRE", "")
    policy.forget_environment()
    assert ran()[0] == "torch"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("determinstic", r"'determinstic'. Known: 'deterministic', 'batch_invariant'. Did you m"),
        ("deterministic=True", r"TORCH_OPS_REQUIRE='deterministic=True' names the unknown promise"),
        ("batch_invariant;deterministic", r"names the unknown promise 'batch_invariant;determ"),
    ],
)
def test_typos_in_the_environment(text: str, message: str) -> None:
    with pytest.raises(UnknownVariableError, match=message) as raised:
        environment.read([], {"TORCH_OPS_REQUIRE": text})
    assert raised.value.variable == "TORCH_OPS_REQUIRE"


@pytest.mark.parametrize("value", ["torch", None, 1, Backend.TORCH], ids=str)
@pytest.mark.parametrize("choose", [torch_ops.use_backend, torch_ops.set_backend])
def test_a_requirement_is_true_or_false(choose: Callable[..., object], value: object) -> None:
    message = rf"{choose.__name__}: deterministic must be a bool, received "
    with pytest.raises(TypeError, match=message):
        choose(deterministic=value)
    assert policy._process == []


def test_a_misspelt_requirement_is_an_unknown_op() -> None:
    with pytest.raises(torch_ops.UnknownOpError, match="op 'determinstic'"):
        torch_ops.use_backend(determinstic=True)


@pytest.mark.parametrize("name", PROMISES)
def test_no_op_has_the_name_of_a_promise(name: str) -> None:
    def declared(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    declared.__name__ = name
    with pytest.raises(DeclarationError, match=rf"op '{name}': that is a promise"):
        op(contract=Contract())(declared)
    with pytest.raises(ValueError, match=rf"KernelSpec.op '{name}' is the name of a promise"):
        KernelSpec(name, "torch", "a:b")
    assert name not in catalogue()


def test_compiled_code_obeys_and_going_back_compiles_nothing(
    state: State, fresh_dynamo: None, opaque: None
) -> None:
    state("inductor", batch_invariant=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch.ops.torch_ops.silu_and_mul, backend=counter, fullgraph=True)

    def graphs(call: Callable[[], object]) -> tuple[str, int]:
        return ran(call)[0], counter.frame_count

    compiled(X)  # outside of a trace, which makes plans of its own
    for _ in range(2):
        assert graphs(lambda: compiled(X))[0] == "torch"
        with torch_ops.use_backend(batch_invariant=True):
            assert graphs(lambda: compiled(X)) == ("inductor", 2)
        undo = torch_ops.set_backend(batch_invariant=True)
        assert graphs(lambda: compiled(X)) == ("inductor", 2)
        undo()
    with torch_ops.use_backend(deterministic=True):
        assert graphs(lambda: compiled(X)) == ("torch", 2)  # the same kernel: the same graph
    with (
        torch_ops.use_backend("torch", batch_invariant=True),
        pytest.raises(Exception, match="promises deterministic, not batch_invariant"),
    ):
        compiled(X)
    refused = counter.frame_count
    assert graphs(lambda: compiled(X)) == ("torch", refused)


@pytest.mark.usefixtures("fresh_dynamo", "uncompiled_attention")
def test_layers_obey(state: State) -> None:
    state("inductor", batch_invariant=True)
    layer = Attention(4, 16, 2, is_causal=True)
    qkv = support.inputs(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for call in (layer, compiled):
        assert ran(lambda call=call: call(*qkv))[0].startswith("torch")  # type: ignore[misc]
        with torch_ops.use_backend(batch_invariant=True):
            backend, skipped = ran(lambda call=call: call(*qkv))  # type: ignore[misc]
            assert backend == "inductor"
            assert "not batch_invariant, which use_backend" in dict(skipped)["torch_flash"]
    with torch_ops.use_backend(batch_invariant=True):
        assert layer.backend.value.startswith("torch")  # what runs outside of any scope
    undo = torch_ops.set_backend(batch_invariant=True)
    assert layer.backend.value == "inductor"
    with pytest.raises(torch_ops.AttentionOverrideError, match="which set_backend requires"):
        override_attention_backend(layer, "torch_flash")
    undo()
    with (
        override_attention_backend(layer, "torch_flash"),
        torch_ops.use_backend(batch_invariant=True),
        pytest.raises(BackendUnavailableError, match="not batch_invariant"),
    ):
        layer(*qkv)


def test_a_foreign_package_states_its_promises(install: Install) -> None:
    install("steady")
    assert kept("steady", "rms_norm") == {"deterministic": True, "batch_invariant": True}
    assert kept("steady", OP) == {"deterministic": False, "batch_invariant": False}
    with torch_ops.use_backend("steady", batch_invariant=True, deterministic=True):
        assert ran(lambda: ops.rms_norm(X))[0] == "steady"
        with pytest.raises(BackendUnavailableError, match="promises nothing, not batch_inv"):
            ops.silu_and_mul(X)


def test_a_promise_of_some_devices(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ops that aren't named the contract speaks."""
    install("steady")
    package = __import__("torch_ops_steady")
    monkeypatch.setattr(package, "deterministic", {"rms_norm": ["cpu"]})
    torch_ops.refresh()
    steady = package_of(registry.find("rms_norm", "steady"))
    for name, device, wanted in (("rms_norm", "cpu", 1), ("rms_norm", "cuda", 0), (OP, "cuda", 1)):
        assert promised(name, steady, device)["deterministic"] == wanted


def test_a_kernel_registered_by_hand_promises_what_the_contract_does(install: Install) -> None:
    install("steady")
    registry.unregister(registry.find("rms_norm", "steady"))
    spec = KernelSpec("rms_norm", "steady", "torch_ops.backends.torch.rms_norm:rms_norm")
    torch_ops.register_kernel(spec)
    assert kept("steady", "rms_norm") == {"deterministic": True, "batch_invariant": False}
    assert promised("undeclared", None, "cpu") == {"deterministic": False, "batch_invariant": False}


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (1, "TypeError: deterministic must be a bool or names of ops, received 1"),
        ("rms_norm", "TypeError: deterministic must be a bool or names of ops, received 'rms_no"),
        (["rms_nrom"], "ValueError: deterministic names 'rms_nrom', which is no module of the p"),
        (
            {"rms_norm": {"gpu"}},
            "ValueError: deterministic names the device 'gpu' (accepted: 'c",
        ),
    ],
    ids=str,
)
def test_a_promise_that_can_t_be_read_makes_the_package_unusable(
    stated: object, message: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("steady")
    package = __import__("torch_ops_steady")
    assert isinstance(package, ModuleType)
    monkeypatch.setattr(package, "deterministic", stated)
    torch_ops.refresh()
    with pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(X, backend="steady")
    assert any(message in reason for reason in raised.value.reasons)
