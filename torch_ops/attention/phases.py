"""`PhaseBackends`: one family for prefill and another one for decode."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ops.attention.backend import AttentionBackend

__all__ = ["PhaseBackends", "Target", "at", "members", "target_of"]


@dataclass(frozen=True, init=False)
class PhaseBackends:
    """What a layer runs by phase.

    A call is of the decode phase where each sequence has one query: ``q`` of ``[B, 1, H, D]``, or
    paged metadata whose longest sequence of queries is 1.

    Attributes:
        prefill: The family of all other calls.
        decode: The family of decode calls.
    """

    prefill: AttentionBackend
    decode: AttentionBackend

    def __init__(self, prefill: AttentionBackend | str, decode: AttentionBackend | str) -> None:
        object.__setattr__(self, "prefill", AttentionBackend(prefill))
        object.__setattr__(self, "decode", AttentionBackend(decode))

    def __str__(self) -> str:
        return f"prefill {self.prefill.value}, decode {self.decode.value}"


Target = AttentionBackend | PhaseBackends
"""What a layer can be overridden with."""


def target_of(value: AttentionBackend | PhaseBackends | str) -> Target:
    """Give a member for its value, and phases as they are.

    Raises:
        ValueError: there is no such family.
    """
    return value if isinstance(value, PhaseBackends) else AttentionBackend(value)


def members(target: Target) -> tuple[AttentionBackend, ...]:
    """Give the families that an override may run, each once."""
    if isinstance(target, PhaseBackends):
        return tuple(dict.fromkeys((target.prefill, target.decode)))
    return (target,)


def at(target: Target | None, decodes: bool) -> AttentionBackend | None:
    """Give the family of a phase."""
    if isinstance(target, PhaseBackends):
        return target.decode if decodes else target.prefill
    return target
