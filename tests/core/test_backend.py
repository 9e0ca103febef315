"""`Backend`: one object per value, open for plugins, usable as a key and across processes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest

import torch_ops
from torch_ops import Backend
from torch_ops.backend import OpenEnum

from .conftest import Install

BUILT_IN = ("torch", "inductor", "triton", "flashinfer", "sgl_kernel", "aiter")


@pytest.mark.parametrize("value", BUILT_IN)
def test_members(value: str) -> None:
    member = Backend(value)
    assert member is getattr(Backend, value.upper())
    assert member.value == str(member) == f"{member}" == value
    assert member.name == value.upper()
    assert repr(member) == f"Backend({value!r})"
    assert member == value
    assert hash(member) == hash(value)


def test_iteration_begins_with_the_built_in_ones() -> None:
    values = [member.value for member in Backend]
    assert tuple(values[: len(BUILT_IN)]) == BUILT_IN
    assert len(values) == len(set(values)) == len(Backend)


@pytest.mark.parametrize("value", BUILT_IN)
def test_identity_survives(value: str) -> None:
    member = Backend(value)
    assert Backend(member) is member
    assert copy.copy(member) is member
    assert copy.deepcopy(member) is member
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member


def test_membership() -> None:
    assert Backend.TRITON in Backend
    assert "triton" in Backend
    assert "nope" not in Backend
    assert 5 not in Backend


@pytest.mark.parametrize("value", ["nope", "TRITON", "", 5, None])
def test_unknown_value(value: object) -> None:
    with pytest.raises(ValueError, match="is not a Backend") as raised:
        Backend(value)  # type: ignore[arg-type]
    assert repr(value) in str(raised.value)
    for known in BUILT_IN:
        assert repr(known) in str(raised.value)


def test_unknown_value_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'triton'"):
        Backend("tritn")


@pytest.mark.parametrize(
    "name",
    [
        lambda: Backend("tritn"),
        lambda: torch_ops.use_backend("tritn"),
        lambda: torch_ops.use_backend(rms_norm="tritn"),
        lambda: torch_ops.set_backend("tritn"),
        lambda: torch_ops.KernelSpec("rms_norm", "tritn", "a:b"),
    ],
)
def test_an_unknown_name_is_one_of_our_errors_and_a_value_error(name: Callable[[], object]) -> None:
    for kind in (torch_ops.UnknownBackendError, torch_ops.TorchOpsError, KeyError, ValueError):
        with pytest.raises(kind) as raised:
            name()
        assert (raised.value.op, raised.value.backend) == (None, "tritn")  # type: ignore[attr-defined]
        copied = pickle.loads(pickle.dumps(raised.value))
        assert str(copied) == str(raised.value)
        assert str(copied).startswith("'tritn' is not a Backend. Known: 'torch', ")


def test_members_are_read_only() -> None:
    with pytest.raises(AttributeError, match="Backend members are read-only"):
        Backend.TORCH.value = "other"
    assert Backend.TORCH.value == "torch"


def test_plugin_becomes_a_member(install: Install) -> None:
    install("acme")
    acme = Backend("acme")
    assert acme is Backend("acme")
    assert acme.value == "acme"
    assert acme in list(Backend)
    assert pickle.loads(pickle.dumps(acme)) is acme


def test_one_object_per_value_under_threads() -> None:
    class Open(OpenEnum):
        pass

    made: list[Open] = []
    barrier = threading.Barrier(8)

    def add() -> None:
        barrier.wait()
        made.extend(Open._add(f"value-{i}") for i in range(200))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1600
    assert len({id(member) for member in made}) == 200
    assert Open("value-7").name == "VALUE_7"
