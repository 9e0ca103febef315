"""`KernelSpec`: a value that says where a kernel is, and imports nothing before ``load``."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import pickle
import sys

import pytest

from torch_ops import Backend, InvalidTargetError, KernelSpec, Platform, Requirement


def test_fields() -> None:
    spec = KernelSpec("x", "triton", "a.b:c.d", frozenset({Requirement.cuda()}))
    assert (spec.op, spec.backend, spec.target) == ("x", Backend.TRITON, "a.b:c.d")
    assert (spec.module, spec.attr) == ("a.b", "c.d")
    assert spec.requires == {Requirement.cuda()}
    assert KernelSpec("x", Backend.TRITON, "a.b:c").requires == frozenset()


def test_is_a_frozen_hashable_value() -> None:
    one = KernelSpec("x", "triton", "m:f", [Requirement.cpu()])
    two = KernelSpec("x", Backend.TRITON, "m:f", frozenset({Requirement.cpu()}))
    assert one == two
    assert len({one, two}) == 1
    assert one != KernelSpec("x", "triton", "m:g", [Requirement.cpu()])
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.target = "m:g"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    "target", ["module", "module.attr", ":f", "m:", "m:f:g", "m f:g", "m:1", ".m:f", "m.:f", "", 5]
)
def test_target_has_to_be_module_and_attribute(target: str) -> None:
    with pytest.raises(InvalidTargetError, match=r"KernelSpec\.target must be 'module:attr'") as e:
        KernelSpec("x", "triton", target)
    assert repr(target) in str(e.value)
    assert "'x'" in str(e.value)


@pytest.mark.parametrize("op", ["", "a b", "a-b", "a.b", 5, None])
def test_op_has_to_be_an_identifier(op: str) -> None:
    with pytest.raises(ValueError, match=r"KernelSpec\.op must be a Python identifier, received"):
        KernelSpec(op, "triton", "m:f")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'nope' is not a Backend"):
        KernelSpec("x", "nope", "m:f")


def test_requires_holds_requirements() -> None:
    with pytest.raises(TypeError, match=r"KernelSpec\.requires of op 'x' must hold Requirement"):
        KernelSpec("x", "triton", "m:f", [Platform.cpu()])  # type: ignore[list-item]


def test_load() -> None:
    assert KernelSpec("x", "triton", "math:sqrt").load() is math.sqrt
    found = KernelSpec("x", "triton", "datetime:date.today").load()
    assert found() == dt.date.today()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        KernelSpec("x", "triton", "no_such_module:f").load()
    with pytest.raises(AttributeError, match="no_such_function"):
        KernelSpec("x", "triton", "math:no_such_function").load()
    with pytest.raises(InvalidTargetError, match=r"'math:pi' of op 'x' is not callable.*float"):
        KernelSpec("x", "triton", "math:pi").load()


def test_nothing_is_imported_before_load() -> None:
    assert "this" not in sys.modules
    spec = KernelSpec("x", "triton", "this:s")
    repr(spec), hash(spec), pickle.dumps(spec)
    assert "this" not in sys.modules
