"""`Backend`: who wrote a kernel. An open enum, since installed plugins add members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from torch_ops import locks
from torch_ops.errors import UnknownBackendError, listing, nearest

__all__ = ["Backend", "OpenEnum"]

_lock = locks.lock()


class _OpenEnumMeta(type):
    """Iteration, length and membership over the members of an `OpenEnum`."""

    _members: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        cls._discover()
        return iter(tuple(cls._members.values()))

    def __len__(cls) -> int:
        return len(tuple(iter(cls)))

    def __contains__(cls, item: object) -> bool:
        return any(member == item for member in cls)

    def _discover(cls) -> None:
        """Add members that come from outside; overridden where there are any."""


class OpenEnum(metaclass=_OpenEnumMeta):
    """A value with a name, one object per value: ``Enum("x") is Enum.X``, also after pickling.

    A member equals its value: ``Enum.X == "x"``.
    """

    _members: ClassVar[dict[str, Any]]
    value: str

    def __init_subclass__(cls) -> None:
        cls._members = {}

    def __new__(cls, value: str | Self) -> Self:
        if isinstance(value, cls):
            return value
        member = cls._members.get(value) if isinstance(value, str) else None
        if member is None:
            cls._discover()
            member = cls._members.get(value) if isinstance(value, str) else None
        if member is None:
            raise cls._refusal(value)
        return member  # type: ignore[no-any-return]

    @classmethod
    def _refusal(cls, value: object) -> ValueError:
        return ValueError(cls._unknown(value))

    @classmethod
    def _unknown(cls, value: object) -> str:
        known = list(cls._members)
        hint = nearest(value, known) if isinstance(value, str) else ""
        article = "an" if cls.__name__[0] in "AEIOU" else "a"
        return f"{value!r} is not {article} {cls.__name__}. Known: {listing(known)}.{hint}"

    @classmethod
    def _add(cls, value: str) -> Self:
        """Return the member of this value, made if it is new."""
        with _lock:
            member = cls._members.get(value)
            if member is None:
                member = object.__new__(cls)
                object.__setattr__(member, "value", value)
                cls._members[value] = member
                name = value.upper().replace("-", "_").replace(".", "_")
                if name.isidentifier() and not hasattr(cls, name):
                    setattr(cls, name, member)
        return member

    @property
    def name(self) -> str:
        """The member's upper-case name, as in ``Backend.TRITON.name == "TRITON"``."""
        return self.value.upper().replace("-", "_").replace(".", "_")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} members are read-only")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, str) and other == self.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.value,)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class _UnknownNameError(UnknownBackendError, ValueError):
    """No installed backend has this name, so that no op has its kernels either."""


class Backend(OpenEnum):
    """Who wrote a kernel; never a device.

    ``Backend("triton") is Backend.TRITON``. Iteration covers the built-in members and the
    installed plugins (entry points of the group ``torch_ops.backends``).

    Raises:
        ValueError: the value is neither built in nor an installed plugin's name. The error is an
            `UnknownBackendError`, too, without an op.
    """

    TORCH: ClassVar[Backend]
    INDUCTOR: ClassVar[Backend]
    TRITON: ClassVar[Backend]
    FLASHINFER: ClassVar[Backend]
    SGL_KERNEL: ClassVar[Backend]
    AITER: ClassVar[Backend]

    @classmethod
    def _refusal(cls, value: object) -> ValueError:
        return _UnknownNameError(cls._unknown(value), op=None, backend=value)

    @classmethod
    def _discover(cls) -> None:
        from torch_ops.discovery import plugin_names

        for name in plugin_names():
            cls._add(name)


for _value in ("torch", "inductor", "triton", "flashinfer", "sgl_kernel", "aiter"):
    Backend._add(_value)
