"""`Attention`: a layer that keeps its prepared implementations and runs one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import repeat
from typing import Any, Self

import torch
from torch import Tensor, nn

from torch_ops import locks
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.cache import Cache
from torch_ops.attention.choice import LayerRules, choose_member
from torch_ops.attention.group import Group, default_group, new_slot
from torch_ops.attention.metadata import AttentionMetadata
from torch_ops.attention.operators import run_layer, run_planned
from torch_ops.attention.phases import Target, at
from torch_ops.attention.prepared import AttentionSpec, Place
from torch_ops.errors import listing

__all__ = ["Attention", "commit", "unite"]

_lock = locks.reentrant()
_PER_OBJECT = ("_cache", "_slot", "_changed_by")


class Attention(nn.Module):
    """Scaled dot product attention whose kernel can be swapped, also in compiled graphs.

    Args:
        num_heads: Query heads H.
        head_dim: Elements D of a head.
        num_kv_heads: Key and value heads K, a divisor of H; default H.
        scale: Multiplier of the logits; default ``head_dim ** -0.5``.
        is_causal: Query i attends to keys up to i + S_kv - S_q.
        window_left: Keys before its own that a query attends to, -1 for all.
        logits_soft_cap: ``cap * tanh(logit / cap)`` before the mask, 0 for none.
        supported_backends: The only families that the layer takes; default all.
        backend: Construction default; an override, scope, process or environment choice wins.
        required_backend: Pins the layer: overrides report it and never switch it.
        role: What ``where`` predicates may go by, such as ``"cross"``.

    Raises:
        ValueError: a number is out of range, a backend is unknown, or they contradict each other.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        supported_backends: Iterable[AttentionBackend | str] | None = None,
        backend: AttentionBackend | str | None = None,
        required_backend: AttentionBackend | str | None = None,
        role: str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_numbers(num_heads, head_dim, num_kv_heads, scale, window_left, logits_soft_cap)
        spec = AttentionSpec(
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim**-0.5 if scale is None else float(scale),
            bool(is_causal),
            window_left,
            float(logits_soft_cap),
        )
        supported = _supported(supported_backends)
        default = None if backend is None else AttentionBackend(backend)
        required = None if required_backend is None else AttentionBackend(required_backend)
        _check_backends(supported, default, required)
        self.role = role
        self._rules = LayerRules(spec, supported, default, required)
        # Moves with the model, so it tells where and in which dtype the layer will be called.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)
        self._group = default_group
        self._reset()

    def _reset(self) -> None:
        self._cache = Cache(self._rules)
        self._slot = new_slot(self._cache)
        self._changed_by = 0

    @property
    def _override(self) -> Target | None:
        return self._group.overrides.get(self._cache.slot)

    @property
    def spec(self) -> AttentionSpec:
        """What the layer asks of a backend."""
        return self._rules.spec

    @property
    def required_backend(self) -> AttentionBackend | None:
        """The family that the layer is pinned to, if any."""
        return self._rules.required

    @property
    def backend(self) -> AttentionBackend:
        """What the next call runs outside of any ``use_backend`` scope.

        Raises:
            BackendUnavailableError, NoBackendError: what that call would raise.
        """
        return self._chosen(self._cache.decoded)

    @backend.setter
    def backend(self, value: object) -> None:
        raise AttributeError(
            "Attention.backend is read-only; use torch_ops.attention.override_attention_backend"
        )

    def _chosen(self, decodes: bool) -> AttentionBackend:
        """Give what a call of a phase runs."""
        override = at(self._override, decodes)
        return choose_member(self._rules, override, None, self._place()).member

    def _place(self) -> Place:
        """Where the layer was called last, else where it is."""
        if self._cache.last is not None:
            return self._cache.last
        device, dtype = self._anchored()
        if device.type == "meta":  # weights come later, to a device of this machine
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Place(device, dtype)

    def _anchored(self) -> tuple[torch.device, torch.dtype]:
        anchor: Tensor = self._anchor  # type: ignore[assignment]
        return anchor.device, anchor.dtype

    def _places(self) -> Set[Place]:
        """What an override must be prepared for."""
        return self._cache.seen or {self._place()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._anchored()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._anchored() != before:
            self._cache.forget_places()
        return self

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata | None = None
    ) -> Tensor:
        """Attend queries to keys and values.

        Args:
            q: ``[B, S_q, H, D]``, any strides; with metadata packed, ``[T, H, D]``.
            k, v: ``[B, S_kv, K, D]``, dtype and device of ``q``; packed ``[N, K, D]`` or, where
                the metadata has pages, caches ``[P, page_size, K, D]``.
            metadata: Lengths and pages of a ragged or paged call.

        Returns:
            As ``q``, contiguous.

        Raises:
            TypeError, ValueError: arguments don't fit the layer.
            BackendUnavailableError, NoBackendError: nothing can run the call.
            NoBackwardError: an input requires grad.
            TorchOpsError: the call is being exported.
        """
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
            raise _not_a_tensor(q=q, k=k, v=v)
        if metadata is None:
            return run_layer(q, k, v, self._slot, self._group.route)
        if not isinstance(metadata, AttentionMetadata):
            raise TypeError(
                f"Attention: argument 'metadata' is a {type(metadata).__name__} (accepted: None or "
                "an AttentionMetadata)"
            )
        tables = metadata.tables
        return run_planned(
            q, k, v, tables.qo_indptr, tables.kv_indptr, tables.kv_indices,
            tables.kv_last_page_len, metadata._step, self._slot, self._group.route,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        for name in _PER_OBJECT:
            state.pop(name, None)
        state["_copied_override"] = self._override
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        override = state.pop("_copied_override")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reset()
        if override is not None:
            commit({self: override})

    def extra_repr(self) -> str:
        """Show geometry and choices in ``print(model)``."""
        spec, rules = self.spec, self._rules
        parts = [f"num_heads={spec.num_heads}, head_dim={spec.head_dim}"]
        parts.append(f"num_kv_heads={spec.num_kv_heads}, is_causal={spec.is_causal}")
        if spec.scale != spec.head_dim**-0.5:
            parts.append(f"scale={spec.scale}")
        if spec.window_left >= 0:
            parts.append(f"window_left={spec.window_left}")
        if spec.logits_soft_cap > 0:
            parts.append(f"logits_soft_cap={spec.logits_soft_cap}")
        if self.role is not None:
            parts.append(f"role={self.role!r}")
        for label, value in (
            ("override", self._override),
            ("default", rules.default),
            ("required", rules.required),
        ):
            if value is not None:
                parts.append(f"{label}={value}")
        return ", ".join(parts)


def commit(overrides: Mapping[Attention, Target | None]) -> None:
    """Make layers run other overrides: one store for each group of them.

    Several groups change in one step: `map` and `setattr` are C, so that the interpreter lets no
    other thread in between.
    """
    with _lock:  # a copy of a layer commits, too, while another thread's override may
        groups = {layer._group for layer in overrides}
        routes = {
            group: group.route_of(
                {
                    layer._cache.slot: override
                    for layer, override in overrides.items()
                    if layer._group is group
                }
            )
            for group in groups
        }
        deque(map(setattr, routes, repeat("route"), routes.values()), maxlen=0)


def unite(layers: Iterable[Attention]) -> None:
    """Let layers change together from now on, by a group of their own."""
    layers = list(layers)
    with _lock:
        groups = {layer._group for layer in layers}
        if len(groups) == 1 and groups != {default_group}:
            return
        group = Group()
        group.route = group.route_of({layer._cache.slot: layer._override for layer in layers})
        inside = [layer.__dict__ for layer in layers]
        deque(map(dict.__setitem__, inside, repeat("_group"), repeat(group)), maxlen=0)


def _not_a_tensor(**arguments: object) -> TypeError:
    name, value = next(item for item in arguments.items() if not isinstance(item[1], Tensor))
    return TypeError(
        f"Attention: argument {name!r} is a {type(value).__name__} (accepted: a torch.Tensor)"
    )


def _supported(
    backends: Iterable[AttentionBackend | str] | None,
) -> frozenset[AttentionBackend] | None:
    if backends is None:
        return None
    families = () if isinstance(backends, str) else tuple(backends)
    if not families:
        raise ValueError(
            f"Attention: argument 'supported_backends' is {backends!r} (accepted: None for all, or "
            "a collection of at least one backend)"
        )
    return frozenset(AttentionBackend(value) for value in families)


def _check_numbers(
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    for name, value in (
        ("num_heads", num_heads),
        ("head_dim", head_dim),
        ("num_kv_heads", num_kv_heads),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"Attention: argument {name!r} is {value!r} (accepted: an int >= 1)")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"Attention: argument 'num_kv_heads' is {num_kv_heads} "
            f"(accepted: a divisor of num_heads {num_heads})"
        )
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"Attention: argument 'scale' is {scale!r} (accepted: a finite number)")
    if not isinstance(window_left, int) or not -1 <= window_left < 2**63:
        raise ValueError(
            f"Attention: argument 'window_left' is {window_left!r} "
            "(accepted: an int >= -1 of 64 bits)"
        )
    if not _is_finite(logits_soft_cap) or logits_soft_cap < 0:
        raise ValueError(
            f"Attention: argument 'logits_soft_cap' is {logits_soft_cap!r} "
            "(accepted: a finite number >= 0)"
        )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= torch.finfo(torch.float32).max


def _check_backends(
    supported: frozenset[AttentionBackend] | None,
    default: AttentionBackend | None,
    required: AttentionBackend | None,
) -> None:
    for name, member in (("backend", default), ("required_backend", required)):
        if member is not None and supported is not None and member not in supported:
            raise ValueError(
                f"Attention: argument {name!r} is {member.value!r} (accepted: one of "
                f"supported_backends, {listing(sorted(other.value for other in supported))})"
            )
    if default is not None and required is not None and default is not required:
        raise ValueError(
            f"Attention: argument 'backend' is {default.value!r} (accepted: None or "
            f"required_backend {required.value!r}, to which the layer is pinned)"
        )
