"""`AttentionBackend`: one kernel family each, and which backend package serves it."""

from __future__ import annotations

from typing import ClassVar

from torch_ops import discovery
from torch_ops.backend import Backend, OpenEnum
from torch_ops.errors import PluginConflictError, listing

__all__ = ["AttentionBackend", "members_of", "provider_of"]


class AttentionBackend(OpenEnum):
    """A family of attention kernels; none of them is generic.

    ``TORCH_MATH``, ``TORCH_FLASH`` and ``TORCH_CUDNN`` are PyTorch's kernels, each pinned;
    ``INDUCTOR`` is the reference, compiled. A plugin adds the members that its package names in
    ``attention_backends``, by default one with its own name.

    Raises:
        ValueError: the value is neither built in nor an installed plugin's.
    """

    TORCH_MATH: ClassVar[AttentionBackend]
    TORCH_FLASH: ClassVar[AttentionBackend]
    TORCH_CUDNN: ClassVar[AttentionBackend]
    INDUCTOR: ClassVar[AttentionBackend]
    TRITON: ClassVar[AttentionBackend]
    FLASHINFER_FA2: ClassVar[AttentionBackend]
    FLASHINFER_FA3: ClassVar[AttentionBackend]
    AITER: ClassVar[AttentionBackend]

    @classmethod
    def _discover(cls) -> None:
        for package in discovery.packages().values():
            for value in package.attention_backends:
                cls._add(value)

    @classmethod
    def _unknown(cls, value: object) -> str:
        text = super()._unknown(value)
        package = discovery.packages().get(value) if isinstance(value, str) else None
        if package is None:
            return text
        package.refuse_conflict()
        if package.attention_backends:
            return f"{text} Backend {value!r} serves {listing(package.attention_backends)}."
        reason = package.problem or "it serves no attention layers"
        return f"{text} A backend {value!r} is installed, but {reason}."


for _value in (
    "torch_math",
    "torch_flash",
    "torch_cudnn",
    "inductor",
    "triton",
    "flashinfer_fa2",
    "flashinfer_fa3",
    "aiter",
):
    AttentionBackend._add(_value)


def members_of(backend: Backend) -> tuple[AttentionBackend, ...]:
    """List the families that a backend's package serves, in its own order."""
    package = discovery.package(backend)
    values = package.attention_backends if package is not None else ()
    return tuple(AttentionBackend(value) for value in values)


def provider_of(member: AttentionBackend) -> discovery.BackendPackage | None:
    """Give the package that serves a family, or None where none is installed.

    Raises:
        PluginConflictError: several packages claim the family.
    """
    packages = discovery.packages().values()
    found = [package for package in packages if member.value in package.attention_backends]
    if len(found) > 1:
        claims = tuple(f"{package.name} ({package.distributions[0]})" for package in found)
        raise PluginConflictError(
            f"Attention backend {member.value!r} is claimed by several backends: "
            f"{', '.join(claims)}. Uninstall all but one of them.",
            backend=member.value,
            distributions=tuple(package.distributions[0] for package in found),
        )
    return found[0] if found else None
