"""Backends by entry point: finds their packages and turns modules into kernel specs.

Imports a backend's package (which imports nothing heavy), never one of its kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from torch_ops import locks
from torch_ops.backend import Backend
from torch_ops.contracts import PROMISES
from torch_ops.errors import PluginConflictError, listing
from torch_ops.platform import DEVICES, Requirement

if TYPE_CHECKING:
    from torch_ops.spec import KernelSpec

__all__ = ["BackendPackage", "load", "package", "packages", "plugin_names", "rescan", "serve"]

GROUP = "torch_ops.backends"
Stated = bool | frozenset[str] | Mapping[str, frozenset[str]]
_log = logging.getLogger(__name__)
_lock = locks.reentrant()
_names: dict[str, list[tuple[str, str]]] | None = None
_packages: dict[str, BackendPackage] | None = None
_loading = False
_loaded = False


@dataclass(frozen=True)
class BackendPackage:
    """What is known of a backend without importing its kernels.

    Attributes:
        name: The entry point's name, which is the backend's value.
        module: Its package, such as ``"torch_ops.backends.torch"``.
        distributions: ``"name version"`` of each distribution that provides the name.
        problem: Why the package can't be used at all (its import failed, or several distributions
            provide it), or None.
        unavailable: What its ``available()`` answered.
        requires: Its conditions on the platform.
        modules: Names of the modules in it; one named as an op serves that op.
        attention_backends: Families of attention kernels that its module ``attention`` prepares.
        promises: For which ops it keeps a promise of `torch_ops.contracts.PROMISES`, True for all
            and none of them where it is empty; the op's contract says it where the name is absent.
            A mapping says on which devices it does for some ops, and nothing of the others.
        declined: Why ops that it doesn't serve aren't served, by their names.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    problem: str | None = None
    unavailable: str | None = None
    requires: frozenset[Requirement] = frozenset()
    modules: frozenset[str] = frozenset()
    attention_backends: tuple[str, ...] = ()
    promises: Mapping[str, Stated] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """Why nothing of the package can be used on this machine, or None."""
        return self.problem or self.unavailable

    @property
    def conflict(self) -> bool:
        """Whether several distributions provide the name."""
        return len(self.distributions) > 1

    def promise(self, name: str, op: str, device: str) -> bool | None:
        """What the package says about a promise for an op, None where it says nothing."""
        stated = self.promises.get(name)
        if isinstance(stated, Mapping):
            return device in stated[op] if op in stated else None
        return op in stated if isinstance(stated, frozenset) else stated

    def refuse_conflict(self) -> None:
        """Raise `PluginConflictError` where several distributions provide the name."""
        if self.conflict:
            raise PluginConflictError(
                f"Backend {self.name!r} is provided by several distributions: "
                f"{', '.join(self.distributions)}. Uninstall all but one of them.",
                backend=self.name,
                distributions=self.distributions,
            )


def _entry_points() -> dict[str, list[tuple[str, str]]]:
    """Map names to the (module, distribution) pairs that provide them."""
    global _names
    with _lock:
        if _names is None:
            found: dict[str, list[tuple[str, str]]] = {}
            for entry in importlib.metadata.entry_points(group=GROUP):
                dist = entry.dist
                label = f"{dist.name} {dist.version}" if dist else "unknown distribution"
                pair = (entry.value, label)
                if pair not in found.setdefault(entry.name, []):
                    found[entry.name].append(pair)
            _names = found
        return _names


def plugin_names() -> list[str]:
    """List the names of all installed backends, built in and foreign."""
    return list(_entry_points())


def packages() -> dict[str, BackendPackage]:
    """Give every installed backend's package by name; imports the packages at first use."""
    global _packages
    with _lock:
        if _packages is None:
            _packages = {
                name: _describe(name, providers) for name, providers in _entry_points().items()
            }
        return _packages


def package(backend: Backend) -> BackendPackage | None:
    """Give the package of a backend, or None for one that was only registered by hand."""
    return packages().get(backend.value)


def _describe(name: str, providers: list[tuple[str, str]]) -> BackendPackage:
    module, labels = providers[0][0], tuple(sorted({label for _, label in providers}))
    if len(providers) > 1:
        labels = labels if len(labels) > 1 else tuple(f"{lab} ({mod})" for mod, lab in providers)
        problem = f"provided by several distributions: {', '.join(labels)}; uninstall all but one"
        modules = frozenset[str]().union(*(_modules_on_disk(other) for other, _ in providers))
        return BackendPackage(name, module, labels, problem, modules=modules)
    try:
        imported = importlib.import_module(module)
        unavailable = _availability(imported)
        requires = frozenset(getattr(imported, "requires", frozenset()))
        modules = frozenset(info.name for info in pkgutil.iter_modules(imported.__path__))
        promises = _promises(imported, modules)
        declined = _declined(imported, modules)
    except Exception as error:  # a plugin's fault must never break another backend
        problem = f"importing {module} failed: {type(error).__name__}: {error}"
        _log.info("backend %r (%s): %s", name, labels[0], problem)
        return BackendPackage(name, module, labels, problem, modules=_modules_on_disk(module))
    families = tuple(getattr(imported, "attention_backends", (name,)))
    families = families if "attention" in modules else ()
    return BackendPackage(
        name, module, labels, None, unavailable, requires, modules, families, promises, declined
    )


def _modules_on_disk(package: str) -> frozenset[str]:
    """Name the modules of a package without importing it, so that its kernels stay listed."""
    try:
        found = importlib.util.find_spec(package)
    except Exception as error:  # a parent that can't be imported either, or no such package
        _log.info("package %s can't be searched: %s: %s", package, type(error).__name__, error)
        return frozenset()
    locations = found.submodule_search_locations if found is not None else None
    return frozenset(info.name for info in pkgutil.iter_modules(locations or ()))


def _availability(module: ModuleType) -> str | None:
    available = getattr(module, "available", None)
    answer = available() if available is not None else None
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise TypeError(f"available() must return None or a reason, received {answer!r}")


def _promises(module: ModuleType, modules: frozenset[str]) -> dict[str, Stated]:
    found: dict[str, Stated] = {}
    for name in PROMISES:
        stated = getattr(module, name, None)
        if isinstance(stated, bool):
            found[name] = stated
        elif isinstance(stated, Collection) and not isinstance(stated, str):
            unknown = sorted(set(stated) - modules)
            if unknown:
                raise ValueError(f"{name} names {unknown[0]!r}, which is no module of the package")
            if isinstance(stated, Mapping):
                found[name] = _devices(name, stated)
            else:
                found[name] = frozenset(stated)
        elif stated is not None:
            raise TypeError(f"{name} must be a bool or names of ops, received {stated!r}")
    return found


def _devices(name: str, stated: Mapping[str, Collection[str]]) -> Mapping[str, frozenset[str]]:
    unknown = sorted({device for each in stated.values() for device in each} - set(DEVICES))
    if unknown:
        raise ValueError(f"{name} names the device {unknown[0]!r} (accepted: {listing(DEVICES)})")
    return {op: frozenset(devices) for op, devices in stated.items()}


def _declined(module: ModuleType, modules: frozenset[str]) -> Mapping[str, str]:
    stated = getattr(module, "declined", {})
    if not isinstance(stated, Mapping) or not all(
        isinstance(part, str) and part for item in stated.items() for part in item
    ):
        raise TypeError(f"declined must map names of ops to reasons, received {stated!r}")
    served = sorted(modules & stated.keys())
    if served:
        raise ValueError(f"declined names {served[0]!r}, which is a module of the package")
    return dict(stated)


def load() -> None:
    """Register the kernels of all installed backends; does nothing the second time."""
    global _loading, _loaded
    if _loaded:
        return
    with _lock:
        if _loaded or _loading:  # the lock is held while loading, so this is the same thread
            return
        _loading = True
        try:
            _exchange(frozenset())
            _loaded = True
        finally:
            _loading = False


def serve(op: str) -> None:
    """Register the kernels of an op that is declared after the backends were loaded."""
    from torch_ops.registry import registry

    if _loaded:
        registry._exchange(frozenset(), _kernels([op]))


def rescan() -> None:
    """Look for entry points and packages anew; kernels registered by hand stay.

    Other threads see the kernels of before or of after, never fewer.
    """
    global _names, _packages
    from torch_ops.declarations import catalogue

    load()
    with _lock:
        before = frozenset(_kernels(catalogue()))
        _names = _packages = None
        importlib.invalidate_caches()
        _exchange(before)


def _exchange(before: frozenset[KernelSpec]) -> None:
    from torch_ops.declarations import catalogue
    from torch_ops.registry import registry

    for name in packages():
        Backend._add(name)
    registry._exchange(before, _kernels(catalogue()))


def _kernels(ops: Iterable[str]) -> dict[KernelSpec, str]:
    """Give the kernels that the installed backends have for these ops, with their distribution."""
    from torch_ops.spec import KernelSpec

    return {
        KernelSpec(op, found.name, f"{found.module}.{op}:{op}", found.requires): (
            found.distributions[0]
        )
        for found in packages().values()
        for op in ops
        if op in found.modules
    }
