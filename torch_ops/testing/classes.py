"""Classes of calls: what a compiled backend compiles anew for, and a limit on how many are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torch_ops.testing.proof import Arguments

Class = tuple[Any, ...]


def class_of(args: Mapping[Any, Any]) -> Class:
    """Dtypes, ranks, sizes of one, absent tensors, flags and signs: not sizes or values."""
    return tuple(_facts(value) for value in args.values())


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(size == 1 for size in value.shape)
    if isinstance(value, float):
        return "float", value > 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int", max(min(value, 2), -1)
    return value


def compiled_for(args: Mapping[Any, Any]) -> str:
    """What a kernel may be compiled for: the class, and each last size's power of two."""
    tensors = (value for value in args.values() if isinstance(value, Tensor) and value.dim())
    sizes = [(value.shape[-1] - 1).bit_length() for value in tensors]
    return f"{class_of(args)} {sizes}"


class ClassLimit:
    """Admits calls of the first `most` classes that it meets, and all that compute nothing."""

    def __init__(self, most: int, seen: Iterable[str] = ()) -> None:
        self.most = most
        self.seen = set(seen)

    def admits(self, args: Arguments) -> bool:
        """Whether a call is of an admitted class; a new one is admitted while there is room."""
        if any(isinstance(v, Tensor) and v.numel() == 0 for v in args.values()):
            return True
        found = repr(class_of(args))  # a text, so that another process can be told
        if found not in self.seen and len(self.seen) < self.most:
            self.seen.add(found)
        return found in self.seen
