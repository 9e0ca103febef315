"""The state of PyTorch beside all tensors: a kernel leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torch_ops.testing.compare import ViolationError


class Setting(NamedTuple):
    """One piece of state: how to read it, and how to put it back."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_default_device(device: torch.device) -> None:
    """None takes the mode away that every other device puts around all calls."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _denormals_are_zero() -> bool:
    return bool(torch.full((), 2.0**-140, dtype=torch.float32) * 0.5 == 0)


_BACKENDS: Any = torch.backends  # mypy doesn't see what their modules are replaced by
_SDPA = ("flash", "mem_efficient", "math", "cudnn")
_PRECISE = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)


def _matmul_precision() -> str | tuple[str, ...]:
    """One word for all backends, or one for each: PyTorch refuses to read what the other set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return tuple(backend.fp32_precision for backend in _PRECISE)


def _set_matmul_precision(precision: str | tuple[str, ...]) -> None:
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
        return
    for backend, word in zip(_PRECISE, precision, strict=True):
        backend.fp32_precision = word


def _stored(random: Callable[[], torch.Tensor]) -> Callable[[], bytes]:
    return lambda: random().numpy().tobytes()


def _random(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _sdpa_kernels() -> tuple[bool, ...]:
    return tuple(getattr(_BACKENDS.cuda, f"{name}_sdp_enabled")() for name in _SDPA)


def _set_sdpa_kernels(enabled: tuple[bool, ...]) -> None:
    for name, on in zip(_SDPA, enabled, strict=True):
        getattr(_BACKENDS.cuda, f"enable_{name}_sdp")(on)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


SETTINGS: dict[str, Setting] = {
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": Setting(torch.get_default_device, _set_default_device),
    "grad mode": Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    "the CPU's random state": Setting(
        _stored(torch.get_rng_state), lambda state: torch.set_rng_state(_random(state))
    ),
    "deterministic algorithms": Setting(
        _deterministic, lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1])
    ),
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "flushing of denormals": Setting(_denormals_are_zero, torch.set_flush_denormal),
    "float32 matmul precision": Setting(_matmul_precision, _set_matmul_precision),
    "autocast on the CPU": Setting(
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    "SDPA's kernels": Setting(_sdpa_kernels, _set_sdpa_kernels),
    "anomaly detection": Setting(_anomaly, lambda on: torch.autograd.set_detect_anomaly(*on)),
    "mkldnn.enabled": _attribute(torch.backends.mkldnn, "enabled"),
    "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
}
CUDA_SETTINGS: dict[str, Setting] = {
    "the current device": Setting(torch.cuda.current_device, torch.cuda.set_device),
    "the current stream": Setting(torch.cuda.current_stream, torch.cuda.set_stream),
    "the GPU's random state": Setting(
        _stored(torch.cuda.get_rng_state), lambda state: torch.cuda.set_rng_state(_random(state))
    ),
    "autocast on the GPU": Setting(
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
    ),
}


@contextmanager
def left_alone(device: torch.device) -> Iterator[None]:
    """Puts the state back that a call changes, and says so.

    Raises:
        ViolationError: The call changed it; what the call raised itself comes first.
    """
    watched = SETTINGS | (CUDA_SETTINGS if device.type == "cuda" else {})
    before = {name: setting.get() for name, setting in watched.items()}
    try:
        yield
    except BaseException:
        _put_back(watched, before)
        raise
    changed = _put_back(watched, before)
    if changed:
        raise ViolationError("contract", f"state of PyTorch: {'; '.join(changed)}")


def _put_back(watched: Mapping[str, Setting], before: Mapping[str, Any]) -> list[str]:
    """In the order of the table: a changed default would change how the rest is read."""
    changed = []
    for name, setting in watched.items():
        now = setting.get()
        if now != before[name]:
            setting.put(before[name])
            shown = "" if isinstance(now, bytes) else f" from {before[name]} to {now}"
            changed.append(f"{name} changed{shown}")
    return changed
