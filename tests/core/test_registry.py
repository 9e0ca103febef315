"""`KernelRegistry`: which kernels exist; one spec per op and backend, and conflicts are loud."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_ops
from torch_ops import (
    Backend,
    KernelRegistry,
    KernelSpec,
    Platform,
    RegistrationConflictError,
    Requirement,
    UnknownBackendError,
    ops,
    policy,
)

TRITON = KernelSpec("x", "triton", "m:f")
TORCH = KernelSpec("x", "torch", "m:g", [Requirement.cpu()])
OTHER = KernelSpec("x", "triton", "m:h", [Requirement.cuda((9, 0))])


@pytest.fixture
def registry() -> KernelRegistry:
    return KernelRegistry()


def test_register_and_get(registry: KernelRegistry) -> None:
    assert registry.get("x") == []
    assert registry.ops() == []
    assert registry.register(TRITON) is TRITON
    assert registry.register(TORCH) is TORCH
    assert registry.get("x") == [TRITON, TORCH]
    assert registry.find("x", "torch") is registry.find("x", Backend.TORCH) is TORCH
    registry.register(KernelSpec("a", "triton", "m:f"))
    assert registry.ops() == ["a", "x"]


def test_what_get_returns_is_a_copy(registry: KernelRegistry) -> None:
    registry.register(TRITON)
    registry.get("x").clear()
    assert registry.get("x") == [TRITON]


def test_an_equal_spec_is_a_no_op(registry: KernelRegistry) -> None:
    registry.register(TRITON)
    print_before = registry.fingerprint()
    again = KernelSpec("x", Backend.TRITON, "m:f")
    assert again is not TRITON
    assert registry.register(again) is TRITON
    assert registry.get("x") == [TRITON]
    assert registry.fingerprint() == print_before


def test_another_spec_is_a_conflict(registry: KernelRegistry) -> None:
    """It says what differs and where both were registered; the first one stays."""
    registry.register(TRITON)
    with pytest.raises(RegistrationConflictError) as raised:
        registry.register(OTHER)
    message = str(raised.value)
    assert "Conflicting kernel registration for op 'x', backend 'triton'" in message
    assert "target 'm:f' != 'm:h'" in message
    assert "requires" in message
    assert "min_arch=(9, 0)" in message
    assert message.count("test_registry.py:") == 2
    assert (raised.value.registered, raised.value.rejected) == (TRITON, OTHER)
    assert registry.get("x") == [TRITON]
    registry.unregister(TRITON)
    assert registry.register(OTHER) is OTHER


def test_sites_are_those_of_the_caller() -> None:
    spec = torch_ops.register_kernel(KernelSpec("only_here", "triton", "m:f"))
    assert torch_ops.registry.site(spec).rpartition(":")[0] == __file__
    built_in = torch_ops.registry.find("rms_norm", "torch")
    assert torch_ops.registry.site(built_in).startswith("torch-ops ")


def test_unregister(registry: KernelRegistry) -> None:
    registry.register(TRITON)
    for missing in (TORCH, OTHER, KernelSpec("y", "triton", "m:f")):
        with pytest.raises(UnknownBackendError, match=f"No '{missing.backend}' backend regist"):
            registry.unregister(missing)
    assert registry.get("x") == [TRITON]
    registry.unregister(KernelSpec("x", "triton", "m:f"))
    assert registry.get("x") == []
    assert registry.ops() == []
    with pytest.raises(UnknownBackendError):
        registry.unregister(TRITON)


def test_find_names_what_is_registered(registry: KernelRegistry) -> None:
    registry.register(TRITON)
    registry.register(TORCH)
    with pytest.raises(UnknownBackendError) as raised:
        registry.find("x", "tritn")
    assert str(raised.value) == (
        "No 'tritn' backend registered for op 'x'. Registered: 'torch', 'triton'. "
        "Did you mean 'triton'?"
    )
    assert (raised.value.op, raised.value.backend) == ("x", "tritn")


@pytest.mark.parametrize("spec", [None, "x", ("x", "triton", "m:f")])
def test_only_specs_are_registered(registry: KernelRegistry, spec: object) -> None:
    with pytest.raises(TypeError, match="register: spec must be a KernelSpec, received"):
        registry.register(spec)  # type: ignore[arg-type]


def test_fingerprint(registry: KernelRegistry) -> None:
    """Equal contents give equal digests in any order; anything that differs gives another."""
    second = KernelRegistry()
    assert registry.fingerprint() == second.fingerprint()
    empty = registry.fingerprint()
    registry.register(TRITON)
    registry.register(TORCH)
    second.register(TORCH)
    assert registry.fingerprint() != second.fingerprint() != empty
    second.register(TRITON)
    assert registry.fingerprint() == second.fingerprint()
    registry.unregister(TRITON)
    registry.register(OTHER)
    assert registry.fingerprint() != second.fingerprint()
    registry.unregister(OTHER)
    registry.unregister(TORCH)
    assert registry.fingerprint() == empty


def test_fingerprint_covers_requirements(registry: KernelRegistry) -> None:
    two = [Requirement.cuda(), Requirement.rocm()]
    registry.register(KernelSpec("x", "triton", "m:f", two))
    second = KernelRegistry()
    second.register(KernelSpec("x", "triton", "m:f", two[:1]))
    assert registry.fingerprint() != second.fingerprint()


def test_a_change_takes_effect_at_once() -> None:
    """No plan outlives a registration; going back gives what was before."""
    x = torch.randn(2, 4)
    expected = ops.rms_norm(x)
    torch_spec = torch_ops.registry.find("rms_norm", "torch")
    generation = policy.generation
    torch_ops.registry.unregister(torch_spec)
    assert policy.generation > generation
    assert torch_ops.select_kernel("rms_norm", platform=Platform.cpu()).backend is Backend.INDUCTOR
    with pytest.raises(UnknownBackendError, match="No 'torch' backend registered"):
        ops.rms_norm(x, backend="torch")
    torch_ops.registry.register(KernelSpec("rms_norm", "torch", f"{__name__}:sevens"))
    assert ops.rms_norm(x).eq(7).all()
    torch_ops.registry.unregister(torch_ops.registry.find("rms_norm", "torch"))
    torch_ops.registry.register(torch_spec)
    assert ops.rms_norm(x).equal(expected)


def sevens(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    return torch.full_like(x, 7)


def test_threads(registry: KernelRegistry) -> None:
    """Of 16 threads that register different specs for one pair, one wins and 15 hear of it."""
    barrier = threading.Barrier(16)
    outcomes: list[KernelSpec | RegistrationConflictError] = []

    def register(index: int) -> None:
        barrier.wait()
        try:
            outcomes.append(registry.register(KernelSpec("x", "triton", f"m:f{index}")))
        except RegistrationConflictError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=register, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, KernelSpec)]
    assert winners == registry.get("x")
    assert len(winners) == 1
    assert len(outcomes) == 16
