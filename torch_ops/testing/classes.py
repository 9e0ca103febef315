"""Classes of calls: what a compiled backend compiles anew for, and a limit on how many are run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_ops.testing.proof import Arguments

Class = tuple[Any, ...]


def class_of(args: Arguments) -> Class:
    """Dtypes, ranks, sizes of one, absent tensors, flags and signs: not sizes or values."""
    return tuple(_facts(value) for value in args.values())


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(size == 1 for size in value.shape)
    if isinstance(value, float):
        return "float", value > 0
    return value if value is None or isinstance(value, bool) else ("int", max(min(value, 2), -1))


class ClassLimit:
    """Admits calls of the first `most` classes that it meets, and all that compute nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._seen: set[Class] = set()

    def admits(self, args: Arguments) -> bool:
        """Whether a call is of an admitted class; a new one is admitted while there is room."""
        if any(isinstance(v, Tensor) and v.numel() == 0 for v in args.values()):
            return True
        found = class_of(args)
        if found not in self._seen and len(self._seen) < self.most:
            self._seen.add(found)
        return found in self._seen
