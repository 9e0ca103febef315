"""`KernelRegistry`: which kernels exist. It knows neither platforms nor preferences."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Set

from torch_ops import discovery, locks
from torch_ops.backend import Backend
from torch_ops.errors import RegistrationConflictError, UnknownBackendError, listing, nearest
from torch_ops.spec import KernelSpec

__all__ = ["KernelRegistry", "register_kernel", "registry"]

_log = logging.getLogger(__name__)


class KernelRegistry:
    """Kernel specs by op and backend; at most one spec a pair.

    ``discover`` is called before the first look-up, ``changed`` after each change.
    """

    def __init__(
        self,
        discover: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._specs: dict[str, dict[Backend, KernelSpec]] = {}
        self._sites: dict[tuple[str, Backend], str] = {}
        self._lock = locks.reentrant()
        self._discover = discover
        self._changed = changed

    def register(self, spec: KernelSpec) -> KernelSpec:
        """Add a kernel. An equal spec is a no-op and gives the one that is registered.

        Raises:
            RegistrationConflictError: another spec holds this op and backend; it stays.
        """
        if not isinstance(spec, KernelSpec):
            raise TypeError(f"register: spec must be a KernelSpec, received {type(spec).__name__}")
        self._discover()
        return self._add(spec, _site())

    def _add(self, spec: KernelSpec, site: str) -> KernelSpec:
        with self._lock:
            held = self._specs.setdefault(spec.op, {})
            first = held.get(spec.backend)
            if first is not None:
                if first == spec:
                    return first
                raise self._conflict(first, spec, site)
            held[spec.backend] = spec
            self._sites[spec.op, spec.backend] = site
            self._changed()
        return spec

    def _conflict(
        self, first: KernelSpec, spec: KernelSpec, site: str
    ) -> RegistrationConflictError:
        differs = [
            f"{field} {getattr(first, field)!r} != {getattr(spec, field)!r}"
            for field in ("target", "requires")
            if getattr(first, field) != getattr(spec, field)
        ]
        return RegistrationConflictError(
            f"Conflicting kernel registration for op {spec.op!r}, backend {spec.backend.value!r}: "
            f"{'; '.join(differs)}. Registered at {self._sites[spec.op, spec.backend]}, "
            f"rejected at {site}. The first one stays; unregister it to replace it.",
            registered=first,
            rejected=spec,
        )

    def unregister(self, spec: KernelSpec) -> None:
        """Remove exactly this spec.

        Raises:
            UnknownBackendError: it isn't registered (another spec of the pair isn't touched).
        """
        self._discover()
        with self._lock:
            held = self._specs.get(spec.op, {})
            if held.get(spec.backend) != spec:
                raise UnknownBackendError(
                    f"No {spec.backend.value!r} backend registered for op {spec.op!r} "
                    f"with target {spec.target!r}. Registered: "
                    f"{listing([other.value for other in held])}.",
                    op=spec.op,
                    backend=spec.backend.value,
                )
            self._remove(spec)

    def _remove(self, spec: KernelSpec) -> None:
        with self._lock:
            del self._specs[spec.op][spec.backend]
            del self._sites[spec.op, spec.backend]
            if not self._specs[spec.op]:
                del self._specs[spec.op]
            self._changed()

    def _exchange(self, old: Set[KernelSpec], new: Mapping[KernelSpec, str]) -> None:
        """Remove and add specs in one step; one that clashes with a registered one is left out."""
        with self._lock:
            for spec in old - new.keys():
                if self._specs.get(spec.op, {}).get(spec.backend) == spec:
                    self._remove(spec)
            for spec, site in new.items():
                try:
                    self._add(spec, site)
                except RegistrationConflictError as error:
                    _log.info("%s", error)

    def get(self, op: str) -> list[KernelSpec]:
        """List the kernels of an op in order of registration; ``[]`` if it is unknown."""
        self._discover()
        with self._lock:
            return list(self._specs.get(op, {}).values())

    def find(self, op: str, backend: Backend | str) -> KernelSpec:
        """Give the kernel of an op and backend.

        Raises:
            UnknownBackendError: there is none; names those that are registered.
        """
        held = {spec.backend.value: spec for spec in self.get(op)}
        name = backend.value if isinstance(backend, Backend) else backend
        if name not in held:
            hint = nearest(name, held) if isinstance(name, str) else ""
            package = discovery.packages().get(name) if isinstance(name, str) else None
            reason = package.declined.get(op) if package is not None else None
            raise UnknownBackendError(
                f"No {name!r} backend registered for op {op!r}"
                f"{f': {reason}' if reason else ''}. "
                f"Registered: {listing(sorted(held))}.{hint}",
                op=op,
                backend=name,
            )
        return held[name]

    def ops(self) -> list[str]:
        """List the names of all ops with a kernel, sorted."""
        self._discover()
        with self._lock:
            return sorted(self._specs)

    def site(self, spec: KernelSpec) -> str:
        """Where a spec was registered: ``file:line`` or the distribution."""
        return self._sites[spec.op, spec.backend]

    def fingerprint(self) -> str:
        """Digest of all specs and declarations: equal registries give equal digests."""
        from torch_ops.declare import declarations_digest

        digest = hashlib.sha256(declarations_digest().encode())
        for op in self.ops():
            for spec in sorted(self.get(op), key=lambda spec: spec.backend.value):
                requires = sorted(map(repr, spec.requires))
                digest.update(f"{op}|{spec.backend.value}|{spec.target}|{requires}\n".encode())
        return digest.hexdigest()[:16]


def _site() -> str:
    """File and line of the first caller outside this package's own modules."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _discover() -> None:
    from torch_ops import discovery

    discovery.load()


def _changed() -> None:
    from torch_ops import policy

    policy.invalidate()


registry = KernelRegistry(_discover, _changed)


def register_kernel(spec: KernelSpec) -> KernelSpec:
    """Register a kernel for any op name, declared or not; see `KernelRegistry.register`."""
    return registry.register(spec)
