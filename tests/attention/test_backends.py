"""`AttentionBackend`: an open enum of kernel families."""

from __future__ import annotations

import copy
import pickle

import pytest

from torch_ops import Backend
from torch_ops.attention import AttentionBackend
from torch_ops.attention.backend import members_of

NAMES = (
    "torch_math",
    "torch_flash",
    "torch_cudnn",
    "inductor",
    "triton",
    "flashinfer_fa2",
    "flashinfer_fa3",
    "aiter",
)


@pytest.mark.parametrize("value", NAMES)
def test_members(value: str) -> None:
    member = AttentionBackend(value)
    assert member is getattr(AttentionBackend, value.upper())
    assert member is AttentionBackend(member)
    assert (member.value, str(member), member.name) == (value, value, value.upper())
    assert member == value
    assert hash(member) == hash(AttentionBackend(value))
    assert member is pickle.loads(pickle.dumps(member))
    assert member is copy.deepcopy(member)
    assert repr(member) == f"AttentionBackend('{value}')"
    assert value in AttentionBackend


def test_iteration_covers_every_member_once() -> None:
    values = [member.value for member in AttentionBackend]
    assert values[: len(NAMES)] == list(NAMES)
    assert len(values) == len(set(values)) == len(AttentionBackend)


def test_unknown_values_name_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="'torch_flsh' is not an AttentionBackend") as error:
        AttentionBackend("torch_flsh")
    assert all(repr(value) in str(error.value) for value in NAMES)
    assert str(error.value).endswith("Did you mean 'torch_flash'?")
    with pytest.raises(ValueError, match="None is not an AttentionBackend"):
        AttentionBackend(None)  # type: ignore[arg-type]
    assert "nope" not in AttentionBackend


def test_a_backend_is_no_attention_backend() -> None:
    with pytest.raises(ValueError, match="is not an AttentionBackend"):
        AttentionBackend(Backend.TRITON)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'torch' is not an AttentionBackend") as error:
        AttentionBackend("torch")
    families = "'torch_flash', 'torch_cudnn', 'torch_math'"
    assert str(error.value).endswith(f"Backend 'torch' serves {families}.")


def test_members_are_read_only() -> None:
    with pytest.raises(AttributeError, match="AttentionBackend members are read-only"):
        AttentionBackend.TORCH_MATH.value = "x"


def test_families_of_the_built_in_backends() -> None:
    torch_families = [member.value for member in members_of(Backend.TORCH)]
    assert torch_families == ["torch_flash", "torch_cudnn", "torch_math"]
    assert members_of(Backend.INDUCTOR) == (AttentionBackend.INDUCTOR,)
    assert members_of(Backend.AITER) == ()
