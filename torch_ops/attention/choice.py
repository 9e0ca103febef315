"""Which family a layer runs: override, scope, process, environment, construction, tuned, order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from torch_ops import policy
from torch_ops.attention.backend import AttentionBackend, members_of
from torch_ops.attention.prepared import AttentionSpec, Place, reasons_against
from torch_ops.errors import BackendUnavailableError, NoBackendError, listing
from torch_ops.platform import Platform
from torch_ops.selector import Candidate

__all__ = ["LayerRules", "MemberChoice", "choose_member", "refusals"]

_log = logging.getLogger(__name__)
_logged: set[tuple[AttentionBackend, str]] = set()
ORDER = {
    "cpu": ("torch_flash", "torch_math", "inductor"),
    "cuda": (
        "flashinfer_fa3",
        "flashinfer_fa2",
        "torch_cudnn",
        "torch_flash",
        "triton",
        "torch_math",
        "inductor",
    ),
    "rocm": ("aiter", "torch_flash", "triton", "torch_math", "inductor"),
}
"""Declared order of families by platform."""


@dataclass(frozen=True)
class LayerRules:
    """What a layer was built with.

    Attributes:
        spec: What it asks of a backend.
        supported: The only families that it takes, None for all.
        default: Its construction default.
        required: The family that it is pinned to.
    """

    spec: AttentionSpec
    supported: frozenset[AttentionBackend] | None = None
    default: AttentionBackend | None = None
    required: AttentionBackend | None = None


class MemberChoice(NamedTuple):
    """A family, who chose it, and which preferred ones can't run, with the reason."""

    member: AttentionBackend
    source: str
    skipped: tuple[tuple[AttentionBackend, str], ...] = ()


def refusals(
    rules: LayerRules,
    member: AttentionBackend,
    place: Place,
    scope: policy.Scope | None = None,
) -> tuple[str, ...]:
    """Give every reason why a layer can't run a family, in a scope; empty if it can."""
    reasons = reasons_against(member, rules.spec, place, scope)
    if rules.supported is not None and member not in rules.supported:
        names = listing(sorted(allowed.value for allowed in rules.supported))
        reasons = (f"not among the layer's supported_backends ({names})", *reasons)
    return reasons


def choose_member(
    rules: LayerRules,
    override: AttentionBackend | None,
    scope: policy.Scope | None,
    place: Place,
) -> MemberChoice:
    """Choose what a layer runs.

    Raises:
        BackendUnavailableError: an explicit choice can't serve the layer.
        NoBackendError: nobody chose, and no family of the declared order can serve it.
    """
    fixed = rules.required or override
    if fixed is not None:
        return MemberChoice(_strict(rules, (fixed,), "layer", place, scope), "layer")
    choice = policy.choose("attention", scope)
    if choice.backend is not None:
        family = members_of(choice.backend)
        if rules.default in family:
            family = (rules.default, *(m for m in family if m is not rules.default))
        if not family:
            raise BackendUnavailableError(
                f"Attention: backend {choice.backend.value!r}, chosen by {choice.source}, "
                "serves no attention layers",
                op="attention",
                backend=choice.backend.value,
                reasons=("serves no attention layers",),
            )
        member = _strict(rules, family, choice.source, place, scope)
        return MemberChoice(member, choice.source)
    if rules.default is not None:
        member = _strict(rules, (rules.default,), "layer", place, scope)
        return MemberChoice(member, "layer")
    return _by_order(rules, place, scope)


def _strict(
    rules: LayerRules,
    family: tuple[AttentionBackend, ...],
    source: str,
    place: Place,
    scope: policy.Scope | None,
) -> AttentionBackend:
    judged = {member: refusals(rules, member, place, scope) for member in family}
    for member, reasons in judged.items():
        if not reasons:
            return member
    lines = [f"    {member.value}  {reason}" for member in judged for reason in judged[member]]
    raise BackendUnavailableError(
        f"Attention: backend {listing([member.value for member in family])}, chosen by {source}, "
        f"can't serve {rules.spec} on {place}\n"
        + "\n".join(lines)
        + "\n  Change what the reasons name, or choose another backend.",
        op="attention",
        backend=family[0].value,
        reasons=tuple(reason for reasons in judged.values() for reason in reasons),
    )


def _by_order(rules: LayerRules, place: Place, scope: policy.Scope | None) -> MemberChoice:
    platform = Platform.detect(place.device)
    best = policy.tuned.get((platform.device, platform.arch, "attention"))
    tuned = members_of(best) if best is not None else ()
    declared = (AttentionBackend(value) for value in ORDER[platform.device])
    candidates: list[tuple[AttentionBackend, tuple[str, ...]]] = []
    for member in dict.fromkeys((*tuned, *declared)):
        reasons = refusals(rules, member, place, scope)
        if not reasons:
            skipped = tuple((other, "; ".join(why)) for other, why in candidates)
            _log_skipped(skipped)
            return MemberChoice(member, "tuned" if member in tuned else "declared", skipped)
        candidates.append((member, reasons))
    lines = [f"    {member.value}  {reason}" for member, all_ in candidates for reason in all_]
    raise NoBackendError(
        f"op 'attention' has no backend usable on device {str(place.device)!r}\n"
        f"  layer     {rules.spec}, {place.dtype}, {place.kind} calls\n" + "\n".join(lines) + "\n"
        "  Change what the reasons name, or give the layer another supported backend.",
        op="attention",
        candidates=tuple(
            Candidate(member, False, reasons, "found")  # type: ignore[arg-type]
            for member, reasons in candidates
        ),
    )


def _log_skipped(skipped: tuple[tuple[AttentionBackend, str], ...]) -> None:
    """Say once that a preferred family can't run, and why."""
    for member, reason in skipped:
        if (member, reason) not in _logged:
            _logged.add((member, reason))
            _log.info("degraded: Attention skips backend %r: %s", member.value, reason)
