"""The ``TORCH_OPS_*`` variables: what they say, when they're read, and what a typo gives."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_ops
from torch_ops import (
    Backend,
    BackendUnavailableError,
    Platform,
    UnknownVariableError,
    environment,
    ops,
    policy,
)

CPU = Platform.cpu()
OPS = ["rms_norm", "layer_norm"]


def read(**variables: str) -> environment.Environment:
    return environment.read(OPS, {f"TORCH_OPS_{key}": value for key, value in variables.items()})


def test_empty() -> None:
    for variables in ({}, {"BACKEND": "", "DISABLE": ""}, {"BACKEND": " , ", "DISABLE": ","}):
        found = read(**variables)
        assert (found.default, dict(found.per_op), dict(found.disabled)) == (None, {}, {})


@pytest.mark.parametrize(
    ("text", "default", "per_op"),
    [
        ("triton", "triton", {}),
        ("rms_norm=flashinfer", None, {"rms_norm": "flashinfer"}),
        (
            "rms_norm=flashinfer,layer_norm=triton",
            None,
            {"rms_norm": "flashinfer", "layer_norm": "triton"},
        ),
        (" torch , rms_norm = inductor ,", "torch", {"rms_norm": "inductor"}),
    ],
)
def test_backend(text: str, default: str | None, per_op: dict[str, str]) -> None:
    found = read(BACKEND=text)
    assert found.default == default
    assert found.per_op == per_op


def test_disable() -> None:
    found = read(DISABLE="flashinfer, rms_norm:triton,rms_norm:torch")
    assert found.disables("rms_norm", Backend.FLASHINFER) == (
        "disabled by TORCH_OPS_DISABLE=flashinfer"
    )
    assert found.disables("layer_norm", Backend.FLASHINFER)
    assert found.disables("rms_norm", Backend.TORCH) == (
        "disabled by TORCH_OPS_DISABLE=rms_norm:torch"
    )
    assert found.disables("rms_norm", Backend.TRITON)
    assert found.disables("layer_norm", Backend.TRITON) is None
    assert found.disables("layer_norm", Backend.TORCH) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"BACKNED": "triton"},
            r"Unknown environment variable TORCH_OPS_BACKNED='triton'.*Did you mean "
            r"'TORCH_OPS_BACKEND'\?",
        ),
        (
            {"BACKEND": "rms_nrom=triton"},
            r"TORCH_OPS_BACKEND='rms_nrom=triton' names the unknown op 'rms_nrom'. "
            r"Known: 'layer_norm', 'rms_norm'. Did you mean 'rms_norm'\?",
        ),
        (
            {"BACKEND": "tritn"},
            r"TORCH_OPS_BACKEND='tritn' names an unknown backend: 'tritn' is not a Backend. "
            r"Known: 'torch', .*Did you mean 'triton'\?",
        ),
        ({"BACKEND": "rms_norm="}, r"names an unknown backend: '' is not a Backend"),
        ({"BACKEND": "=triton"}, r"names the unknown op ''"),
        ({"DISABLE": "rms_nrom:triton"}, r"TORCH_OPS_DISABLE=.* unknown op 'rms_nrom'"),
        ({"DISABLE": "flashinfr"}, r"TORCH_OPS_DISABLE=.*Did you mean 'flashinfer'\?"),
        ({"DISABLE": "rms_norm=triton"}, r"'rms_norm=triton' names an .*one op write op:backend"),
        ({"BACKEND": "rms_norm:triton"}, r"'rms_norm:triton' names an .*one op write op=backend"),
    ],
    ids=str,
)
def test_typos(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UnknownVariableError, match=message) as raised:
        read(**variables)
    assert raised.value.variable == f"TORCH_OPS_{next(iter(variables))}"


def test_every_variable_is_described() -> None:
    names = {
        "TORCH_OPS_BACKEND",
        "TORCH_OPS_DISABLE",
        "TORCH_OPS_INLINE",
        "TORCH_OPS_REQUIRE",
        "TORCH_OPS_TUNING_TABLE",
    }
    assert set(environment.VARIABLES) == names
    assert all(environment.VARIABLES.values())


def test_read_at_the_first_resolution_and_by_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
    monkeypatch.setenv("TORCH_OPS_BACKEND", "rms_norm=inductor")
    assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
    torch_ops.refresh()
    assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.INDUCTOR
    assert torch_ops.select_kernel("layer_norm", platform=CPU).backend is Backend.TORCH
    explained = torch_ops.explain("rms_norm", platform=CPU)
    assert (explained.chosen, explained.source) == (Backend.INDUCTOR, "environment")


def test_what_was_read_before_a_refresh_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads is done in the middle of the refresh."""
    has_read, ends, read_now = threading.Event(), threading.Event(), environment.read
    invalidate = policy.invalidate

    def read_slowly(*args: object, **kwargs: object) -> environment.Environment:
        found = read_now(*args, **kwargs)  # type: ignore[arg-type]
        has_read.set()
        ends.wait(10)
        return found

    def invalidated() -> None:
        ends.set()
        reader.join(0.5)
        invalidate()

    policy.forget_environment()
    monkeypatch.setattr(environment, "read", read_slowly)
    reader = threading.Thread(target=policy.env)
    reader.start()
    assert has_read.wait(10)
    monkeypatch.setattr(environment, "read", read_now)
    monkeypatch.setenv("TORCH_OPS_BACKEND", "inductor")
    monkeypatch.setattr(policy, "invalidate", invalidated)
    policy.forget_environment()
    reader.join()
    assert policy.env().default is Backend.INDUCTOR


def test_a_typo_is_an_error_at_every_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPS_BACKNED", "triton")
    torch_ops.refresh()
    x = torch.randn(2, 4)
    for _ in range(2):
        for use in (
            lambda: torch_ops.select_kernel("rms_norm"),
            lambda: torch_ops.get_kernel("rms_norm"),
            lambda: torch_ops.explain("rms_norm"),
            lambda: ops.rms_norm(x),
            lambda: torch.ops.torch_ops.rms_norm(x),
            lambda: ops.rms_norm(x, backend="torch"),
        ):
            with pytest.raises(UnknownVariableError, match="TORCH_OPS_BACKNED"):
                use()
    monkeypatch.delenv("TORCH_OPS_BACKNED")
    torch_ops.refresh()
    assert ops.rms_norm(x).shape == x.shape


@pytest.mark.parametrize("source", ["call", "scope", "process", "environment"])
def test_disable_wins_over_everything(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPS_DISABLE", "rms_norm:inductor")
    if source == "environment":
        monkeypatch.setenv("TORCH_OPS_BACKEND", "inductor")
    torch_ops.refresh()
    x = torch.randn(2, 4)
    if source == "process":
        torch_ops.set_backend("inductor")
    scope = torch_ops.use_backend("inductor" if source == "scope" else None)
    reason = "disabled by TORCH_OPS_DISABLE=rms_norm:inductor"
    with scope, pytest.raises(BackendUnavailableError, match=f"chosen by {source}") as raised:
        ops.rms_norm(x, backend="inductor" if source == "call" else None)
    assert raised.value.reasons == (reason,)
    with torch_ops.use_backend("torch"):
        assert ops.rms_norm(x).shape == x.shape


def test_values_that_other_tools_set_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OPTIONS", "1")
    monkeypatch.setenv("torch_ops_backend", "nope")
    torch_ops.refresh()
    assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
