"""Launches Triton kernels. The first launch of a variant compiles; later ones skip the analysis.

Triton looks at every argument of every launch to find the variant that it has compiled for. Here
kernels specialize on nothing but dtypes, constants and whether pointers are aligned, all of which
the caller's key names, so that a known variant is handed to Triton's launcher at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from torch_ops.errors import CaptureError
from torch_ops.platform import CONVERTS_FLOAT8, Platform, rejection

__all__ = [
    "INTERPRETED",
    "INTERPRETED_TILE",
    "WARP",
    "Kernel",
    "Launch",
    "Variant",
    "device_function",
    "kernel",
    "multiprocessors",
    "refuses_bfloat16",
    "refuses_float8",
    "remember",
]

_F = TypeVar("_F", bound=Callable[..., Any])

INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED_TILE = 8192  # elements; the interpreter costs time per program, not per element
_INTERPRETED_MULTIPROCESSORS = 4
_REMEMBERED = 4096
WARP = 64 if torch.version.hip else 32
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def _launch_hooks() -> list[Any] | None:
    """Give Triton's list of launch hooks, empty unless a profiler runs; None if it is unknown."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", None)
    tested = (3, 6) <= version <= (3, 9)
    return hooks if tested and isinstance(hooks, list) and not INTERPRETED else None


_HOOKS = _launch_hooks()


class Variant:
    """A kernel for one device, one set of constants, and the dtypes of its first launch.

    Attributes:
        constants: Values of its compile-time parameters.
        threads: Threads of one program.
        device: Index of the GPU, -1 on a CPU.
    """

    __slots__ = ("_compiled", "_direct", "_function", "_options", "constants", "device", "threads")

    def __init__(
        self,
        function: Any,
        constants: Sequence[Any],
        threads: int,
        device: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._function = function
        self._options = {"enable_fp_fusion": False, **options}  # a * b + c rounds twice by default
        self._compiled: Any = None
        self._direct: tuple[Any, ...] | None = None
        self.constants = tuple(constants)
        self.threads = threads
        self.device = device

    def __call__(self, programs: int, pointers: Sequence[Any], numbers: Sequence[float]) -> None:
        """Launch on the device of the tensors and on its current stream.

        Args:
            programs: Size of the grid.
            pointers: Tensors, descriptors of tensors, None for those that are absent.
            numbers: Values of the other run-time parameters.
        """
        if self._direct is None or _HOOKS or _current_device() != self.device:
            self._launch_by_triton(programs, pointers, numbers)
            return
        run, function, metadata = self._direct
        run(
            programs, 1, 1, _current_stream(self.device), function, metadata, None, None, None,
            *[at.data_ptr() if isinstance(at, Tensor) else at for at in pointers],
            *numbers, *self.constants,
        )  # fmt: skip

    def _launch_by_triton(
        self, programs: int, pointers: Sequence[Any], numbers: Sequence[float]
    ) -> None:
        """Launch the usual way, which compiles where needed, on the right device."""
        on_gpu = self.device >= 0
        if on_gpu and self._compiled is None and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"Triton kernel {self._function.__name__!r}: not compiled for these dtypes and "
                "sizes, and a stream is capturing; prepare first: make the call once before the "
                "capture"
            )
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            compiled = self._function[(programs,)](
                *pointers,
                *numbers,
                *self.constants,
                num_warps=max(1, self.threads // WARP),
                **self._options,
            )
        if self._compiled is None and not INTERPRETED:
            self._compiled = compiled
            if _HOOKS is not None:
                self._direct = (compiled.run, compiled.function, compiled.packed_metadata)


class Kernel:
    """A Triton function.

    Its parameters are pointers (annotated ``tl.tensor``), then numbers (of a type of Triton's),
    then compile-time constants.

    Attributes:
        name: The function's name.
    """

    def __init__(self, function: Callable[..., Any], unaligned: Sequence[str]) -> None:
        hints = {name: str(hint) for name, hint in function.__annotations__.items()}
        hints.pop("return", None)
        pointers = [name for name, hint in hints.items() if hint in ("Any", "tl.tensor")]
        numbers = [name for name, hint in hints.items() if hint.startswith(("tl.int", "tl.float"))]
        self.name = function.__name__
        self._aligned = triton.jit(
            do_not_specialize=numbers, do_not_specialize_on_alignment=list(unaligned)
        )(function)
        self._unaligned = triton.jit(
            do_not_specialize=numbers, do_not_specialize_on_alignment=pointers
        )(function)

    def variant(
        self,
        constants: Sequence[Any],
        threads: int,
        device: int,
        *,
        aligned: bool,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Variant:
        """Make a variant: for these arguments and for one dtype of each tensor.

        Args:
            constants: Values of the compile-time parameters, in order.
            threads: Threads of one program.
            device: Index of the GPU, -1 on a CPU.
            aligned: Whether all pointers but those named unaligned are multiples of 16 bytes.
            options: Further options of Triton's compiler, such as ``num_stages``.
        """
        function = self._aligned if aligned else self._unaligned
        return Variant(function, constants, threads, device, options)


class Launch(NamedTuple):
    """A launch that was made: for arguments of these shapes, strides and dtypes, and for good.

    Attributes:
        variant: What was launched.
        programs: Size of the grid.
        numbers: Values of the run-time parameters that follow from shapes and strides.
        lane: Elements that a thread accesses at once; if more than 1, what it reads is aligned.
    """

    variant: Variant
    programs: int
    numbers: tuple[int, ...]
    lane: int


def remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep what a call needs, by its shapes; forget all where there are too many shapes."""
    if len(table) >= _REMEMBERED:
        table.clear()
    table[key] = value


def device_function(function: _F) -> _F:
    """Make a function that kernels call; Triton inlines it."""
    made: _F = triton.jit(function)
    return made


def kernel(*, unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a Triton kernel of a function.

    Args:
        unaligned: Pointers of which no alignment is known.
    """
    return lambda function: Kernel(function, unaligned)


@functools.cache
def multiprocessors(device: int) -> int:
    """Give how many a GPU has; a few for -1, the interpreter."""
    if device < 0:
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def refuses_bfloat16(op: Callable[..., Any], *places: int) -> Callable[..., str | None] | None:
    """Give an op's predicate: None on a GPU, where its kernels take every legal call.

    Args:
        op: Its kernel.
        *places: Of arguments, beside the first, whose dtype is that of an output.
    """
    if not INTERPRETED:
        return None

    def supports(*args: Any) -> str | None:
        written = [args[place] for place in (0, *places) if place < len(args)]
        if any(x is not None and x.dtype == torch.bfloat16 for x in written):
            return (
                "torch.bfloat16 is untestable in Triton's interpreter, which truncates where a GPU "
                "rounds (supported there: torch.float16, torch.float32, torch.float64)"
            )
        return None

    supports.__signature__ = inspect.signature(op)  # type: ignore[attr-defined]
    return supports


def refuses_float8(op: Callable[..., Any]) -> Callable[..., str | None]:
    """Give the predicate of an op that makes float8, which not every device converts to."""

    def supports(*args: Any) -> str | None:
        return _lacks_float8(args[0].device)

    supports.__signature__ = inspect.signature(op)  # type: ignore[attr-defined]
    return supports


@functools.cache
def _lacks_float8(device: torch.device) -> str | None:
    if INTERPRETED:
        return (
            "float8 is untestable in Triton's interpreter, which loses the carry of a rounding "
            "that a GPU keeps (supported there: int8)"
        )
    reason = rejection(CONVERTS_FLOAT8, Platform.detect(device))
    return None if reason is None else f"float8 in Triton: {reason}"
