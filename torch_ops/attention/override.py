"""Overrides: prepare and validate every layer first, then commit all of them, or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from torch_ops import dynamo, locks, once, policy
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.choice import refusals
from torch_ops.attention.layer import Attention, commit, unite
from torch_ops.attention.phases import Target, members
from torch_ops.attention.selection import select
from torch_ops.errors import AttentionOverrideError, CaptureError, TorchOpsError, listing

__all__ = [
    "OverrideReport",
    "OverrideToken",
    "apply_attention_backend_override",
    "override_attention_backend",
    "prepare_attention_backend_override",
    "refuse_now",
    "swap",
]

_lock = locks.reentrant()
_generations = itertools.count(1)
_generation = 0


@dataclass(frozen=True)
class OverrideReport:
    """What an override did, by qualified layer name.

    Attributes:
        switched: Layers that run the target now and didn't before.
        unchanged: Layers that were configured so already.
        pinned: Layers with a required backend; never switched.
        generation: Number of the change; the last one's where nothing was switched.
    """

    switched: tuple[str, ...]
    unchanged: tuple[str, ...]
    pinned: tuple[str, ...]
    generation: int


class OverrideToken(AbstractContextManager["OverrideToken"]):
    """Takes an override back: by `undo`, or at the end of a ``with`` block.

    Attributes:
        report: What the override did.
    """

    def __init__(
        self,
        report: OverrideReport,
        before: dict[str, tuple[Attention, Target | None, int]],
    ) -> None:
        self.report = report
        self._before = before

    def undo(self) -> None:
        """Put back exactly what was; the second time it does nothing.

        Raises:
            AttentionOverrideError: a later override of one of the layers stands; nothing changes.
            CaptureError: a stream is capturing.
        """
        if self._before:
            refuse_now("Undoing an attention override")
        with _lock:
            late: dict[str, tuple[str, ...]] = {
                name: (f"changed later, by override {layer._changed_by}; undo that one first",)
                for name, (layer, _, _) in self._before.items()
                if layer._changed_by != self.report.generation
            }
            if late:
                raise _refusal(
                    f"Attention override {self.report.generation} can't be undone out of order",
                    late,
                )
            commit({layer: override for layer, override, _ in self._before.values()})
            for layer, _, changed_by in self._before.values():
                layer._changed_by = changed_by
            self._before = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def _refusal(title: str, refused: dict[str, tuple[str, ...]]) -> AttentionOverrideError:
    lines = [f"    {name or 'Attention'}  {reason}" for name in refused for reason in refused[name]]
    return AttentionOverrideError(
        f"{title}:\n" + "\n".join(lines) + "\n  Nothing was changed.", refused=refused
    )


def refuse_now(what: str) -> None:
    """Refuse what may happen neither in traced code nor in a capture."""
    if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise():
        raise TorchOpsError(
            f"{what} can't happen inside code that torch.compile traces; call it before or after "
            "the compiled function"
        )
    if once.capturing():
        raise CaptureError(f"{what} is refused while a stream is capturing; do it before")


def _families(layer: Attention, target: Target | None) -> tuple[AttentionBackend, ...]:
    """Give what a layer may run once it is overridden."""
    wanted = layer._rules.default if target is None else target
    return () if wanted is None else members(wanted)


def _prepare(layer: Attention, target: Target | None) -> tuple[str, ...]:
    """Prepare a layer for every place it is used at; give the reasons why it can't, if so."""
    reasons = [reason for member in _families(layer, target) for reason in _against(layer, member)]
    return tuple(dict.fromkeys(reasons))


def _against(layer: Attention, member: AttentionBackend) -> list[str]:
    reasons: list[str] = []
    generation, seen = policy.generation, layer._cache.seen
    for place in sorted(layer._places(), key=str):
        refused = refusals(layer._rules, member, place)
        reasons += refused
        if refused or place.device.type == "meta":
            continue
        try:
            prepared = layer._cache.prepare(member, place)
        except CaptureError:
            raise
        except Exception as error:  # a backend's fault is a reason: the other layers must not move
            reasons.append(f"preparing {member.value!r} raised {type(error).__name__}: {error}")
            continue
        if prepared.backend is not member:
            reasons.append(
                f"Attention backend override {member.value!r} resolved to "
                f"{prepared.backend.value!r} on {type(layer).__name__}; "
                "refusing the request instead of silently falling back"
            )
    if not reasons:
        layer._cache.judged(member, generation, seen)
    return reasons


def _pinned_reason(layer: Attention) -> str:
    required = layer._rules.required
    assert required is not None
    return f"pinned to required_backend {required.value!r}"


def prepare_attention_backend_override(layer: Attention, target: AttentionBackend | str) -> None:
    """Load, compile and run a backend once for a layer, so that the override itself is fast.

    Raises:
        AttentionOverrideError: the layer can't run the target; ``refused`` holds the reasons.
        CaptureError: a stream is capturing.
        ValueError: the target is unknown.
    """
    refuse_now("Preparing an attention override")
    member = AttentionBackend(target)
    layer = _layer(layer)
    _refuse_pinned(layer, member)
    with _kept_on_success({layer: member}):
        reasons = _prepare(layer, member)
        if reasons:
            raise _one_refusal(member, layer, reasons)


def apply_attention_backend_override(
    layer: Attention, target: AttentionBackend | str | None
) -> None:
    """Make one layer run a backend from its next call on; None is its construction default.

    Raises:
        AttentionOverrideError: the layer can't run the target, or is pinned to another one.
        CaptureError: a stream is capturing.
        ValueError: the target is unknown.
    """
    refuse_now("An attention override")
    member = None if target is None else AttentionBackend(target)
    layer = _layer(layer)
    _refuse_pinned(layer, member)
    with _lock, _kept_on_success({layer: member}):
        reasons = _prepare(layer, member)
        if reasons:
            raise _one_refusal(member, layer, reasons)
        _commit({layer: member})


def _refuse_pinned(layer: Attention, member: AttentionBackend | None) -> None:
    required = layer._rules.required
    if required is not None and member is not None and member is not required:
        raise _one_refusal(member, layer, (_pinned_reason(layer),))


def _layer(layer: object) -> Attention:
    layer = getattr(layer, "_orig_mod", layer)  # torch.compile(layer)
    if not isinstance(layer, Attention):
        raise TypeError(
            f"attention override: argument 'layer' is a {type(layer).__name__} "
            "(accepted: torch_ops.attention.Attention)"
        )
    return layer


def _one_refusal(
    member: AttentionBackend | None, layer: Attention, reasons: tuple[str, ...]
) -> AttentionOverrideError:
    name = "None" if member is None else member.value
    return _refusal(
        f"Attention backend override {name!r} is refused by {type(layer).__name__}", {"": reasons}
    )


def override_attention_backend(
    model: nn.Module,
    target: AttentionBackend | str | None,
    *,
    where: str | Callable[[str, Attention], bool] | None = None,
    allow_noop: bool = False,
    dry_run: bool = False,
) -> OverrideToken:
    """Make the attention layers of a model run a backend from their next call on; all or none.

    Compiled graphs follow without a recompile after the first swap.

    Args:
        model: Any module; its `Attention` layers are found at any depth.
        target: The family; None for each layer's construction default.
        where: Which layers: a glob over qualified names, or a predicate of name and layer.
        allow_noop: Accept that no layer is selected, or that all selected ones are pinned.
        dry_run: Prepare and validate alone; the report says what would be switched.

    Returns:
        A token with the report and ``undo``; as a context manager it undoes at the end.

    Raises:
        AttentionOverrideError: a layer can't run the target, or none is selected. ``refused``
            maps layer names to reasons; nothing was changed.
        CaptureError: a stream is capturing.
        ValueError: the target is unknown.
    """
    refuse_now("An attention override")
    member = None if target is None else AttentionBackend(target)
    layers = select(model, where)
    pinned = {name: layer for name, layer in layers.items() if layer._rules.required is not None}
    if len(pinned) == len(layers) and not allow_noop:
        names = list(select(model, None))
        some = listing(names[:3]) + (", ..." if len(names) > 3 else "")
        raise AttentionOverrideError(
            f"Attention override: 0 of {len(names)} layers changed"
            + (f" ({len(pinned)} selected ones are pinned)" if pinned else "")
            + f"; where={where!r} selects no layer that can be switched. "
            + (f"It is a glob over the names {some}. " if isinstance(where, str) and names else "")
            + "Pass allow_noop=True if that is intended.",
            refused={name: (_pinned_reason(layer),) for name, layer in pinned.items()},
        )
    everything = layers.values() if where is None else select(model, None).values()
    return swap(dict.fromkeys(layers, member), layers, everything, dry_run)


def swap(
    targets: Mapping[str, Target | None],
    layers: Mapping[str, Attention],
    together: Iterable[Attention],
    dry_run: bool,
) -> OverrideToken:
    """Override each layer that isn't pinned with its target, all or none.

    Args:
        targets: Families by layer's name.
        layers: The layers by name.
        together: Layers that change together from now on.
        dry_run: Prepare and validate alone.
    """
    free = {name: layer for name, layer in layers.items() if layer._rules.required is None}
    pinned = tuple(name for name in layers if name not in free)
    generation = policy.generation
    families = {id(target): members(target) for target in targets.values() if target is not None}
    unprepared = {
        name: layer
        for name, layer in free.items()
        if not layer._cache.fit(
            families.get(id(target := targets[name])) or _families(layer, target), generation
        )
    }
    with _lock, _kept_on_success({layer: targets[name] for name, layer in unprepared.items()}):
        refused = {
            name: reasons
            for name, layer in unprepared.items()
            if (reasons := _prepare(layer, targets[name]))
        }
        if refused:
            names = {str(targets[name]) for name in free}
            raise _refusal(
                f"Attention backend override {', '.join(map(repr, sorted(names)))} is refused by "
                f"{len(refused)} of {len(layers)} layers",
                refused,
            )
        overrides = {group: group.overrides for group in {layer._group for layer in free.values()}}
        before = {
            name: (layer, override, layer._changed_by)
            for name, layer in free.items()
            if (override := overrides[layer._group].get(layer._cache.slot)) is not targets[name]
            and override != targets[name]
        }
        switched = tuple(before)
        unchanged = tuple(name for name in free if name not in before)
        if dry_run:
            before = {}
        elif switched:
            unite(together)
            _commit({layer: targets[name] for name, (layer, _, _) in before.items()})
        report = OverrideReport(switched, unchanged, pinned, _generation)
        return OverrideToken(report, before)


def _commit(overrides: Mapping[Attention, Target | None]) -> None:
    """Store the new overrides of all layers; nothing in here can fail."""
    global _generation
    generation = next(_generations)
    commit(overrides)
    for layer in overrides:
        layer.__dict__["_changed_by"] = generation  # a module's own way of setting is slow
    _generation = generation


@contextmanager
def _kept_on_success(wanted: Mapping[Attention, Target | None]) -> Iterator[None]:
    """Give back what was prepared for a change that fails: its memory must not stay."""
    held = [
        (layer._cache, member, layer._cache.held(member))
        for layer, target in wanted.items()
        for member in _families(layer, target)
    ]
    try:
        yield
    except BaseException:
        for cache, one, keys in held:
            cache.keep_only(one, keys)
        raise
