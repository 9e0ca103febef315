"""What one layer keeps: its prepared implementations, and which of them runs when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops import once, policy, tracing
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.choice import LayerRules, MemberChoice, choose_member
from torch_ops.attention.prepared import PreparedAttention, prepare
from torch_ops.errors import BackendUnavailableError, CaptureError
from torch_ops.once import KernelLoadError

__all__ = ["Cache"]

_Key = tuple[AttentionBackend, torch.device, torch.dtype]
_Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cache:
    """A layer's prepared implementations by family, device and dtype."""

    def __init__(self, rules: LayerRules) -> None:
        self.rules = rules
        self.seen: set[tuple[torch.device, torch.dtype]] = set()
        self.last: tuple[torch.device, torch.dtype] | None = None
        self._prepared: dict[_Key, PreparedAttention] = {}
        self._judged_in: dict[_Key, int] = {}
        self._plans: tuple[int, dict[Any, _Run]] = (-1, {})
        self._lock = threading.RLock()

    def run(self, override: AttentionBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with an override, or else with what is chosen now for the device and dtype."""
        now = policy.generation
        made_in, plans = self._plans
        if made_in != now:
            # One store of both: a plan that is still being made under the old one stays there.
            plans = {}
            self._plans = (now, plans)
        key = (override, policy.current_scope(), q.device, q.dtype)
        run = plans.get(key)
        if run is None:
            run = plans[key] = self._resolve(override, q.device, q.dtype)
        return run(q, k, v)

    def _resolve(
        self, override: AttentionBackend | None, device: torch.device, dtype: torch.dtype
    ) -> _Run:
        self.note((device, dtype))
        choice = choose_member(self.rules, override, policy.current_scope(), device, dtype)
        try:
            prepared = self.prepare(choice.member, device, dtype)
        except KernelLoadError as error:
            if choice.source != "declared":
                raise _refused(choice, f"loading it failed: {error}") from error
            return self._resolve(override, device, dtype)  # a reason against it now
        if prepared.backend is not choice.member:
            raise _refused(choice, f"resolved to {prepared.backend.value!r}")
        run = prepared.run if getattr(prepared, "graph_safe", True) else _uncaptured(prepared)
        return _traced(run, choice) if tracing.active() else run

    def get(
        self, member: AttentionBackend, device: torch.device, dtype: torch.dtype
    ) -> PreparedAttention | None:
        """Give what is prepared, or None."""
        return self._prepared.get((member, device, dtype))

    def prepare(
        self, member: AttentionBackend, device: torch.device, dtype: torch.dtype
    ) -> PreparedAttention:
        """Prepare a family unless it is prepared; a result of another family isn't kept.

        Raises:
            CaptureError: it isn't prepared and a stream is capturing.
            Exception: whatever the backend raises.
        """
        key = (member, device, dtype)
        prepared = self._prepared.get(key)
        if prepared is not None:  # without the lock: another family may be long in the making
            return prepared
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is None:
                if once.capturing():
                    raise CaptureError(
                        f"Attention backend {member.value!r} is not prepared for {device}, "
                        f"{dtype}, and a stream is capturing; prepare first: "
                        "prepare_attention_backend_override(layer, backend), or run it once"
                    )
                prepared = prepare(member, self.rules.spec, device, dtype)
                if prepared.backend is member:
                    self._prepared[key] = prepared
            return prepared

    def is_ready(self, member: AttentionBackend, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a family is prepared and nothing has changed since it was judged fit."""
        key = (member, device, dtype)
        return key in self._prepared and self._judged_in.get(key) == policy.generation

    def judged(self, key: _Key, generation: int) -> None:
        """Remember that a family was judged fit under a policy's generation."""
        self._judged_in[key] = generation

    def note(self, place: tuple[torch.device, torch.dtype]) -> None:
        """Remember where the layer is called, which need not be where it was moved to."""
        self.seen.add(place)
        self.last = place

    def forget_places(self) -> None:
        """The layer has moved: where it was called says nothing about where it will be."""
        self.seen = set()
        self.last = None

    def held(self, member: AttentionBackend) -> set[_Key]:
        """Keys of what is prepared of a family."""
        with self._lock:
            return {key for key in self._prepared if key[0] is member}

    def keep_only(self, member: AttentionBackend, keys: set[_Key]) -> None:
        """Drop what is prepared of a family but for these keys."""
        with self._lock:
            for key in self.held(member) - keys:
                del self._prepared[key]
                self._judged_in.pop(key, None)


def _refused(choice: MemberChoice, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"Attention backend {choice.member.value!r}, chosen by {choice.source}, {reason}; "
        "refusing it instead of silently falling back",
        op="attention",
        backend=choice.member.value,
        reasons=(reason,),
    )


def _uncaptured(prepared: PreparedAttention) -> _Run:
    """Refuse to run in a capture what a replay wouldn't run right."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if once.capturing():
            raise CaptureError(
                f"Attention backend {prepared.backend.value!r} can't run in a CUDA graph (its "
                "graph_safe is False), and a stream is capturing; choose another one before the "
                "capture"
            )
        return prepared.run(q, k, v)

    return run


def _traced(run: _Run, choice: MemberChoice) -> _Run:
    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = run(q, k, v)
        tracing.note("attention", choice.member, choice.source, choice.skipped)
        return result

    return noted
