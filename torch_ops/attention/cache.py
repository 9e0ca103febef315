"""What one layer keeps: its prepared implementations, and which of them runs when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from torch_ops import locks, once, policy, tracing
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.choice import LayerRules, MemberChoice, choose_member
from torch_ops.attention.metadata import AttentionMetadata, Tables
from torch_ops.attention.phases import Target, at
from torch_ops.attention.prepared import Place, PreparedAttention, prepare
from torch_ops.errors import BackendUnavailableError, CaptureError
from torch_ops.once import KernelLoadError

__all__ = ["Cache"]

_Key = tuple[AttentionBackend, Place]
_Run = Callable[..., Tensor]


class Cache:
    """A layer's prepared implementations by family and place.

    Attributes:
        rules: What the layer was built with.
        slot: Names the layer in graphs.
        seen: Where and how the layer was called.
        last: The last of these.
        decoded: Whether the last call was of the decode phase.
    """

    def __init__(self, rules: LayerRules) -> None:
        self.rules = rules
        self.slot = 0
        self.seen: frozenset[Place] = frozenset()
        self.last: Place | None = None
        self.decoded = False
        self._prepared: dict[_Key, PreparedAttention] = {}
        self._fit: dict[AttentionBackend, tuple[int, frozenset[Place]]] = {}
        self._plans: tuple[int, dict[Any, _Run]] = (-1, {})
        self._lock, self._noting = locks.reentrant(), locks.lock()

    def run(self, override: Target | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with an override, or else with what is chosen now for the device and dtype."""
        self.decoded = q.shape[1] == 1
        member = at(override, self.decoded)
        return self._find(member, Place(q.device, q.dtype))(q, k, v)

    def run_planned(
        self,
        override: Target | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Attend packed queries likewise, by the tables of a step."""
        place = Place(q.device, q.dtype, metadata.kind)
        self.decoded = tables.decodes
        return self._find(at(override, self.decoded), place)(q, k, v, tables, metadata)

    def _find(self, override: AttentionBackend | None, place: Place) -> _Run:
        now = policy.generation
        made_in, plans = self._plans
        if made_in != now:
            # One store of both: a plan that is still being made under the old one stays there.
            plans = {}
            self._plans = (now, plans)
        self.last = place
        key = (override, policy.current_scope(), place)
        run = plans.get(key)
        if run is None:
            run = plans[key] = self._resolve(override, place)
        return run

    def _resolve(self, override: AttentionBackend | None, place: Place) -> _Run:
        self.note(place)
        choice = choose_member(self.rules, override, policy.current_scope(), place)
        try:
            prepared = self.prepare(choice.member, place)
        except KernelLoadError as error:
            if choice.source != "declared":
                raise _refused(choice, f"loading it failed: {error}") from error
            return self._resolve(override, place)  # a reason against it now
        if prepared.backend is not choice.member:
            raise _refused(choice, f"resolved to {prepared.backend.value!r}")
        run = prepared.run if place.kind == "dense" else _planned(prepared, place)
        if not getattr(prepared, "graph_safe", True):
            run = _uncaptured(prepared.backend, run)
        return tracing.counted(run, _way(choice)) if tracing.active() else run

    def foresee(self, override: AttentionBackend | None, place: Place) -> tracing.Way:
        """Tell how a call goes, without running it."""
        return _way(choose_member(self.rules, override, policy.current_scope(), place))

    def get(self, member: AttentionBackend, place: Place) -> PreparedAttention | None:
        """Give what is prepared, or None."""
        return self._prepared.get((member, place))

    def prepare(self, member: AttentionBackend, place: Place) -> PreparedAttention:
        """Prepare a family unless it is prepared; a result of another family isn't kept.

        Raises:
            CaptureError: it isn't prepared and a stream is capturing.
            Exception: whatever the backend raises.
        """
        key = (member, place)
        prepared = self._prepared.get(key)
        if prepared is not None:  # without the lock: another family may be long in the making
            return prepared
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is None:
                if once.capturing():
                    raise CaptureError(
                        f"Attention backend {member.value!r} is not prepared for {place}, "
                        "and a stream is capturing; prepare first: "
                        "prepare_attention_backend_override(layer, backend), or run it once"
                    )
                prepared = prepare(member, self.rules.spec, place)
                if prepared.backend is member:
                    self._prepared[key] = prepared
            return prepared

    def fit(self, members: Iterable[AttentionBackend], generation: int) -> bool:
        """Whether families are prepared wherever the layer was seen, and nothing changed since."""
        fit, seen = self._fit, self.seen
        for member in members:
            found = fit.get(member)
            if found is None or found[0] != generation or found[1] is not seen:
                return False
        return True

    def judged(self, member: AttentionBackend, generation: int, places: frozenset[Place]) -> None:
        """Remember that a family fits under a policy's generation at what was `seen` then."""
        self._fit[member] = generation, places

    def note(self, place: Place) -> None:
        """Remember where the layer is called, which need not be where it was moved to."""
        with self._noting:
            if place not in self.seen:
                self.seen = self.seen | {place}

    def forget_places(self) -> None:
        """The layer has moved: where it was called says nothing about where it will be."""
        with self._noting:
            self._fit.clear()
            self._plans = (-1, {})  # a call at an old place is noted again
            self.seen = frozenset()
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
                self._fit.pop(member, None)


def _way(choice: MemberChoice) -> tracing.Way:
    """Name how a layer's call goes in a trace."""
    return tracing.way_of("attention", choice.member, choice.source, choice.skipped)


def _refused(choice: MemberChoice, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"Attention backend {choice.member.value!r}, chosen by {choice.source}, {reason}; "
        "refusing it instead of silently falling back",
        op="attention",
        backend=choice.member.value,
        reasons=(reason,),
    )


def _planned(prepared: PreparedAttention, place: Place) -> _Run:
    attend = prepared.run_ragged if place.kind == "ragged" else prepared.run_paged
    if type(prepared).plan is PreparedAttention.plan:  # the metadata has nothing to keep of it
        return lambda q, k, v, tables, metadata: attend(q, k, v, tables, None)

    def run(q: Tensor, k: Tensor, v: Tensor, tables: Tables, metadata: AttentionMetadata) -> Tensor:
        return attend(q, k, v, tables, metadata.planned(prepared))

    return run


def _uncaptured(member: AttentionBackend, run: _Run) -> _Run:
    """Refuse to run in a capture what a replay wouldn't run right."""

    def uncaptured(*args: Any) -> Tensor:
        if once.capturing():
            raise CaptureError(
                f"Attention backend {member.value!r} can't run in a CUDA graph (its graph_safe is "
                "False), and a stream is capturing; choose another one before the capture"
            )
        return run(*args)

    return uncaptured
