"""What a layer asks of a backend and what it gets: `AttentionSpec` and `PreparedAttention`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import once, policy
from torch_ops.attention.backend import AttentionBackend, provider_of
from torch_ops.attention.metadata import AttentionMetadata, Kind, Tables
from torch_ops.backend import Backend
from torch_ops.once import KernelLoadError
from torch_ops.platform import Platform
from torch_ops.selector import policy_reasons

__all__ = ["AttentionSpec", "Place", "PreparedAttention", "prepare", "reasons_against"]

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


class Place(NamedTuple):
    """Where and how a layer is called."""

    device: torch.device
    dtype: torch.dtype
    kind: Kind = "dense"

    def __str__(self) -> str:
        calls = "" if self.kind == "dense" else f", {self.kind} calls"
        return f"{self.device}, {self.dtype}{calls}"


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

    def run_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, plan: Any = None
    ) -> Tensor:
        """Attend packed ``[T, H, D]`` queries to ``[N, K, D]`` keys and values."""
        raise NotImplementedError(f"{type(self).__name__} serves no ragged calls")

    def run_paged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, plan: Any = None
    ) -> Tensor:
        """Attend packed ``[T, H, D]`` queries to caches ``[P, page_size, K, D]``."""
        raise NotImplementedError(f"{type(self).__name__} serves no paged calls")

    @property
    def plan_key(self) -> Hashable:
        """What shares a plan: layers for which `plan` would make the same one."""
        return self

    def plan(self, metadata: AttentionMetadata, state: Any) -> Any:
        """Plan a step on the host, outside of graphs.

        Args:
            metadata: The step's numbers.
            state: What this returned for the metadata's earlier numbers, None at first. A graph
                may have captured it: it is brought up to date where it is.

        Returns:
            What ``run_ragged`` and ``run_paged`` are given.
        """
        return None


def reasons_against(
    member: AttentionBackend,
    spec: AttentionSpec,
    place: Place,
    scope: policy.Scope | None = None,
) -> tuple[str, ...]:
    """Give every reason why a family can't serve a layer's calls; empty if it can."""
    package = provider_of(member)
    if package is None:
        return (f"no installed backend serves {member.value!r}",)
    package.refuse_conflict()
    platform = Platform.detect(place.device)
    backend = Backend(package.name)
    reasons = policy_reasons("attention", backend, package.requires, platform, package, scope)
    if package.refusal:
        reasons.append(package.refusal)
    failed = once.failure(_key(member, spec, place))
    if failed:
        reasons.append(f"loading it failed: {failed}")
    if reasons:
        return tuple(reasons)
    try:
        reason = _supports(package.module, spec, place, member)
    except Exception as error:  # whatever a foreign module raises is a reason, kept and shown
        return (f"{package.module}.attention: {type(error).__name__}: {error}",)
    return (reason,) if reason is not None else ()


def prepare(member: AttentionBackend, spec: AttentionSpec, place: Place) -> PreparedAttention:
    """Have a backend prepare a family and run it once on a few zeros.

    Raises:
        KernelLoadError: its code can't be loaded or compiled: a reason against it from now on.
        Exception: whatever else the backend raises; the caller turns it into a reason.
    """
    try:
        with torch.inference_mode(False):  # calls outside of it write what is allocated now
            return _prepare(member, spec, place)
    except Exception as error:
        reason = once.load_failure(error)
        if reason is None:
            raise
        once.fail(_key(member, spec, place), reason)
        raise KernelLoadError(reason) from error


def _key(member: AttentionBackend, spec: AttentionSpec, place: Place) -> Hashable:
    return ("attention layer", member, spec, place)


def _prepare(member: AttentionBackend, spec: AttentionSpec, place: Place) -> PreparedAttention:
    package = provider_of(member)
    if package is None:
        raise LookupError(f"no installed backend serves {member.value!r}")
    prepared = _call(_module(package.module).prepare, spec, place, member)
    if not isinstance(getattr(prepared, "backend", None), AttentionBackend):
        raise TypeError(
            f"prepare() of {package.name!r} must return a PreparedAttention that names its "
            f"AttentionBackend, received {prepared!r}"
        )
    if prepared.backend is member:
        _first_runs(prepared, spec, place)
    return prepared  # type: ignore[no-any-return]


def _supports(
    package: str, spec: AttentionSpec, place: Place, member: AttentionBackend
) -> str | None:
    name = "supports" if place.kind == "dense" else f"supports_{place.kind}"
    supports = getattr(_module(package), name, None)
    if supports is None and place.kind != "dense":
        return f"{place.kind} calls ({member.value} serves dense ones)"
    reason = _call(supports, spec, place, member) if supports is not None else None
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise TypeError(f"{name}() must return None or a reason, received {reason!r}")


def _module(package: str) -> Any:
    return importlib.import_module(f"{package}.attention")


def _call(
    function: Callable[..., Any],
    spec: AttentionSpec,
    place: Place,
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
        return function(spec, place.device, place.dtype, member)
    return function(spec, place.device, place.dtype)


def _first_runs(prepared: PreparedAttention, spec: AttentionSpec, place: Place) -> None:
    """Let first-call allocations and compiles happen here, outside of any capture."""
    with torch.no_grad():
        if place.kind == "dense":
            for batch in (2, 1):  # one sequence may have a kernel of its own
                q = _zeros(place, (batch, 2, spec.num_heads, spec.head_dim))
                k = _keys(spec, place, batch, 3)
                v = k.clone()
                _judge(prepared, prepared.run(q, k, v), q, k, v)
            return
        for query_lens, kv_lens in (((1, 2), (1, 3)), ((1, 1), (1, 3))):
            metadata, run = _small(prepared, place, query_lens, kv_lens)
            q = _zeros(place, (sum(query_lens), spec.num_heads, spec.head_dim))
            shape = (sum(kv_lens),) if place.kind == "ragged" else (2, 4)
            k = _keys(spec, place, *shape)
            v, plan = k.clone(), metadata.planned(prepared)
            _judge(prepared, run(q, k, v, metadata.tables, plan), q, k, v)


def _zeros(place: Place, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, device=place.device, dtype=place.dtype)


def _keys(spec: AttentionSpec, place: Place, *leading: int) -> Tensor:
    return _zeros(place, (*leading, spec.num_kv_heads, spec.head_dim))


def _small(
    prepared: PreparedAttention, place: Place, query_lens: Sequence[int], kv_lens: Sequence[int]
) -> tuple[AttentionMetadata, Callable[..., Tensor]]:
    if place.kind == "ragged":
        made = AttentionMetadata.ragged(query_lens, kv_lens, device=place.device)
        return made, prepared.run_ragged
    pages, device = ((0,), (1,)), place.device
    made = AttentionMetadata.paged(
        query_lens, kv_lens, pages, page_size=4, num_pages=2, device=device
    )
    return made, prepared.run_paged


def _judge(prepared: PreparedAttention, out: object, q: Tensor, k: Tensor, v: Tensor) -> None:
    if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
        received = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else repr(out)
        raise TypeError(
            f"run() of {prepared.backend.value!r} returned {received}, "
            f"expected {q.dtype} {list(q.shape)}"
        )
    if any(_is_alias_of(out, given) for given in (q, k, v)):
        raise TypeError(
            f"run() of {prepared.backend.value!r} returned memory of its arguments, expected a "
            "fresh tensor"
        )
