"""What a layer asks of a backend and what it gets: `AttentionSpec` and `PreparedAttention`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops import once, policy
from torch_ops.attention.backend import AttentionBackend, provider_of
from torch_ops.backend import Backend
from torch_ops.once import KernelLoadError
from torch_ops.platform import Platform
from torch_ops.selector import policy_reasons

__all__ = ["AttentionSpec", "PreparedAttention", "prepare", "reasons_against"]

_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of a backend.

    Attributes:
        num_heads: Query heads H.
        num_kv_heads: Key and value heads K; K divides H.
        head_dim: Elements D of a head.
        scale: Multiplier of the logits.
        is_causal: The last query attends to the last key.
        window_left: Keys before its own that a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask, 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool
    window_left: int
    logits_soft_cap: float


class PreparedAttention:
    """An implementation that is ready to run; a backend's ``prepare`` returns one.

    Attributes:
        backend: The family that will run; an override that asked for another one is refused.
        graph_safe: Whether it may run while a CUDA graph is captured.
    """

    backend: AttentionBackend
    graph_safe: bool = True

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend ``[B, S_q, H, D]`` queries to ``[B, S_kv, K, D]`` keys and values."""
        raise NotImplementedError(f"{type(self).__name__} serves no dense calls")


def reasons_against(
    member: AttentionBackend,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    scope: policy.Scope | None = None,
) -> tuple[str, ...]:
    """Give every reason why a family can't serve a layer on a device; empty if it can."""
    package = provider_of(member)
    if package is None:
        return (f"no installed backend serves {member.value!r}",)
    package.refuse_conflict()
    platform = Platform.detect(device)
    backend = Backend(package.name)
    reasons = policy_reasons("attention", backend, package.requires, platform, package, scope)
    if package.refusal:
        reasons.append(package.refusal)
    failed = once.failure(_key(member, spec, device, dtype))
    if failed:
        reasons.append(f"loading it failed: {failed}")
    if reasons:
        return tuple(reasons)
    try:
        reason = _supports(package.module, spec, device, dtype, member)
    except Exception as error:  # whatever a foreign module raises is a reason, kept and shown
        return (f"{package.module}.attention: {type(error).__name__}: {error}",)
    return (reason,) if reason is not None else ()


def prepare(
    member: AttentionBackend, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> PreparedAttention:
    """Have a backend prepare a family and run it once on a few zeros.

    Raises:
        KernelLoadError: its code can't be loaded or compiled: a reason against it from now on.
        Exception: whatever else the backend raises; the caller turns it into a reason.
    """
    try:
        return _prepare(member, spec, device, dtype)
    except Exception as error:
        reason = once.load_failure(error)
        if reason is None:
            raise
        once.fail(_key(member, spec, device, dtype), reason)
        raise KernelLoadError(reason) from error


def _key(
    member: AttentionBackend, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> Hashable:
    return ("attention layer", member, spec, device, dtype)


def _prepare(
    member: AttentionBackend, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> PreparedAttention:
    package = provider_of(member)
    if package is None:
        raise LookupError(f"no installed backend serves {member.value!r}")
    prepared = _call(_module(package.module).prepare, spec, device, dtype, member)
    if not isinstance(getattr(prepared, "backend", None), AttentionBackend):
        raise TypeError(
            f"prepare() of {package.name!r} must return a PreparedAttention that names its "
            f"AttentionBackend, received {prepared!r}"
        )
    if prepared.backend is member:
        _first_run(prepared, spec, device, dtype)
    return prepared  # type: ignore[no-any-return]


def _supports(
    package: str,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    member: AttentionBackend,
) -> str | None:
    supports = getattr(_module(package), "supports", None)
    reason = _call(supports, spec, device, dtype, member) if supports is not None else None
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise TypeError(f"supports() must return None or a reason, received {reason!r}")


def _module(package: str) -> Any:
    return importlib.import_module(f"{package}.attention")


def _call(
    function: Callable[..., Any],
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    member: AttentionBackend,
) -> Any:
    """Call ``supports`` or ``prepare``; a package of several families takes which one, too."""
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(wanted) >= 4:
        return function(spec, device, dtype, member)
    return function(spec, device, dtype)


def _first_run(
    prepared: PreparedAttention, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> None:
    """Let first-call allocations and compiles happen here, outside of any capture."""
    q = torch.zeros(2, 2, spec.num_heads, spec.head_dim, device=device, dtype=dtype)
    k = torch.zeros(2, 3, spec.num_kv_heads, spec.head_dim, device=device, dtype=dtype)
    v = torch.zeros_like(k)
    with torch.no_grad():
        out = prepared.run(q, k, v)
    if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != dtype:
        received = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else repr(out)
        raise TypeError(
            f"run() of {prepared.backend.value!r} returned {received}, "
            f"expected {dtype} {list(q.shape)}"
        )
    if any(_is_alias_of(out, given) for given in (q, k, v)):
        raise TypeError(
            f"run() of {prepared.backend.value!r} returned memory of its arguments, expected a "
            "fresh tensor"
        )
