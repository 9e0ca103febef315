"""What kernels promise beyond right results, and what a policy misses in them."""

from __future__ import annotations

from collections.abc import Mapping

from torch_ops import discovery
from torch_ops.contracts import PROMISES
from torch_ops.discovery import BackendPackage
from torch_ops.spec import KernelSpec

__all__ = ["lacking", "package_of", "promised"]


def promised(op: str, package: BackendPackage | None, device: str) -> dict[str, bool]:
    """Give what a package's kernel of an op promises: by its own word, else by the contract's.

    Args:
        op: The op.
        package: The package, None for a kernel that was registered by hand.
        device: That of a `Platform`.
    """
    from torch_ops.declarations import catalogue

    contract = getattr(catalogue().get(op), "contract", None)
    stated = {name: package.promise(name, op, device) if package else None for name in PROMISES}
    return {
        name: getattr(contract, name, False) if value is None else value
        for name, value in stated.items()
    }


def package_of(spec: KernelSpec) -> BackendPackage | None:
    """Give the package that a kernel belongs to, None for one that was registered by hand."""
    package = discovery.package(spec.backend)
    own = package is not None and spec.target.startswith(f"{package.module}.")
    return package if own else None


def lacking(
    op: str, package: BackendPackage | None, required: Mapping[str, str], device: str
) -> list[str | None]:
    """Give why a kernel doesn't promise what is required, each by whom; None where it does."""
    kept = promised(op, package, device) if required else {}
    return [_unpromised(name, source, kept) for name, source in required.items()]


def _unpromised(name: str, source: str, kept: dict[str, bool]) -> str | None:
    if kept[name]:
        return None
    others = ", ".join(other for other, value in kept.items() if value) or "nothing"
    return (
        f"promises {others}, not {name}, which {source} requires; choose a backend that "
        "promises it, or drop the requirement"
    )
