"""`Platform`: where a kernel runs, and `Requirement`: where it may run. Pure values, one probe."""

from __future__ import annotations

import functools
import platform as _host
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CONVERTS_FLOAT8", "DEVICES", "Platform", "Requirement", "platform_of"]

DEVICES = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Platform:
    """One device as selection sees it.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or ``"rocm"``. ROCm tensors have device type ``"cuda"`` in
            PyTorch; the build (``torch.version.hip``) tells them apart.
        arch: ``"sm_90"``, ``"gfx942"``, or None on a CPU and where it is unknown.
        index: Device index, None on a CPU.
        name: What people call it, such as ``"NVIDIA H200"``.
    """

    device: str
    arch: str | None = None
    index: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(
                f"Platform: device {self.device!r} is not known (accepted: 'cpu', 'cuda', 'rocm')"
            )

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Platform:
        """Probe a device: the given one, else the current GPU, else the CPU.

        Raises:
            ValueError: the device type has no kernels here (``meta``, ``mps``, ...).
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cpu":
            return cls.cpu()
        if device.type != "cuda":
            raise ValueError(
                f"Platform.detect: device {str(device)!r} is not supported "
                "(accepted: 'cpu', 'cuda', 'cuda:N')"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        return _probe_gpu(index)

    @classmethod
    def cpu(cls) -> Platform:
        """The CPU of this machine."""
        return cls("cpu", None, None, _host.machine() or "CPU")

    @classmethod
    def cuda(cls, capability: tuple[int, int], index: int = 0) -> Platform:
        """An NVIDIA GPU by compute capability; needs no such GPU."""
        arch = f"sm_{capability[0]}{capability[1]}"
        return cls("cuda", arch, index, f"NVIDIA {arch}")

    @classmethod
    def rocm(cls, arch: str, index: int = 0) -> Platform:
        """An AMD GPU by its gfx name (``"gfx942"``); needs no such GPU."""
        return cls("rocm", arch.split(":", maxsplit=1)[0], index, f"AMD {arch}")

    @property
    def capability(self) -> tuple[int, int] | None:
        """``(9, 0)`` for ``"sm_90"``; None where there is none or it can't be read."""
        if self.device != "cuda" or not self.arch or not self.arch.startswith("sm_"):
            return None
        digits = self.arch[3:].rstrip("af")
        return (int(digits[:-1]), int(digits[-1])) if digits.isdigit() and digits[1:] else None

    @property
    def fp8(self) -> torch.dtype:
        """The float8 that its matrix units take: e4m3fn, or e4m3fnuz (largest 240) on gfx94x."""
        fnuz = self.device == "rocm" and (self.arch or "").startswith("gfx94")
        return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn

    def __str__(self) -> str:
        return ", ".join(part for part in (self.device, self.arch, self.name) if part)


@functools.lru_cache(maxsize=64)
def _probe_gpu(index: int) -> Platform:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0] or None
        return Platform("rocm", arch, index, properties.name)
    arch = f"sm_{properties.major}{properties.minor}"
    return Platform("cuda", arch, index, properties.name)


def forget_probes() -> None:
    """Probe every device anew at the next use."""
    _probe_gpu.cache_clear()


def platform_of(args: Sequence[Any]) -> Platform | None:
    """Detect the platform of the first tensor among call arguments, or None without one."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return Platform.detect(arg.device)
    return None


@dataclass(frozen=True)
class Requirement:
    """A condition on the platform; all its fields must hold.

    A kernel carries a set of them, of which any may hold; an empty set means anywhere.
    """

    device: str
    min_arch: tuple[int, int] | None = None
    max_arch: tuple[int, int] | None = None
    archs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(
                f"Requirement: device {self.device!r} is not known "
                "(accepted: 'cpu', 'cuda', 'rocm')"
            )

    @classmethod
    def cpu(cls) -> Requirement:
        """Any CPU."""
        return cls("cpu")

    @classmethod
    def cuda(
        cls, min_arch: tuple[int, int] | None = None, max_arch: tuple[int, int] | None = None
    ) -> Requirement:
        """NVIDIA GPUs with a compute capability in ``[min_arch, max_arch]``."""
        return cls(
            "cuda",
            None if min_arch is None else (int(min_arch[0]), int(min_arch[1])),
            None if max_arch is None else (int(max_arch[0]), int(max_arch[1])),
        )

    @classmethod
    def rocm(cls, archs: Sequence[str] | None = None) -> Requirement:
        """AMD GPUs, all or those named (``["gfx942"]``)."""
        if isinstance(archs, str):
            raise TypeError(
                f"Requirement.rocm: archs must be a sequence of names, received {archs!r}"
            )
        return cls("rocm", archs=None if archs is None else tuple(archs))

    def rejects(self, platform: Platform) -> str | None:
        """Give the reason why the platform doesn't satisfy this, or None if it does."""
        if platform.device != self.device:
            return _only({self.device}, platform)
        if self.archs is not None and platform.arch not in self.archs:
            return f"arch {platform.arch or 'unknown'} (supported: {', '.join(self.archs)})"
        if self.min_arch is None and self.max_arch is None:
            return None
        capability = platform.capability
        if capability is None:
            return (
                f"arch {platform.arch or 'unknown'} can't be compared (supported: {self._range()})"
            )
        if self.min_arch is not None and capability < self.min_arch:
            return f"arch {platform.arch} is too old (supported: {self._range()})"
        if self.max_arch is not None and capability > self.max_arch:
            return f"arch {platform.arch} is too new (supported: {self._range()})"
        return None

    def _range(self) -> str:
        low = f"sm_{self.min_arch[0]}{self.min_arch[1]}" if self.min_arch else ""
        high = f"sm_{self.max_arch[0]}{self.max_arch[1]}" if self.max_arch else ""
        if low and high:
            return f"{low} to {high}"
        return f"{low} and newer" if low else f"up to {high}"


CONVERTS_FLOAT8 = frozenset(
    {Requirement.cuda(min_arch=(8, 9)), Requirement.rocm(["gfx942", "gfx950"])}
)
"""Where Triton, and what Inductor makes of it, converts to the float8 of the device."""


def _only(devices: set[str], platform: Platform) -> str:
    names = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}
    wanted = " or ".join(names[device] for device in sorted(devices))
    return f"{wanted} only (device is {platform.device!r})"


def rejection(requires: frozenset[Requirement], platform: Platform) -> str | None:
    """Give why no requirement of the set holds, or None (an empty set always holds)."""
    if not requires:
        return None
    reasons = [requirement.rejects(platform) for requirement in requires]
    if any(reason is None for reason in reasons):
        return None
    devices = {requirement.device for requirement in requires}
    if platform.device not in devices:
        return _only(devices, platform)
    return "; ".join(sorted({str(reason) for reason in reasons}))
