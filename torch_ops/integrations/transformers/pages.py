"""Pages of a pool, and the sequences that hold them: numbers on the host alone."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

from torch_ops.errors import TorchOpsError

__all__ = ["Held", "OutOfPagesError", "PagePool"]


class OutOfPagesError(TorchOpsError, RuntimeError):
    """A step needs more pages than are free; nothing was changed.

    Attributes:
        needed: Pages that the step needs beyond those that its sequences hold.
        free: Pages that are free.
    """

    def __init__(self, message: str = "", needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


@dataclass
class Held:
    """What a sequence holds: its pages in the order of its tokens, and how many tokens."""

    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0


class PagePool:
    """Gives pages to sequences that grow, and takes them back.

    Args:
        pages: How many there are.
        page_size: Tokens of a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        for name, value in (("pages", pages), ("page_size", page_size)):
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"PagedCache: argument {name!r} is {value!r} (accepted: an int >= 1)"
                )
        self.pages, self.page_size = pages, page_size
        self.free = list(range(pages - 1, -1, -1))
        self._held: dict[int, Held] = {}
        self._names = itertools.count()

    def open(self) -> int:
        """Begin a sequence; returns its number."""
        number = next(self._names)
        self._held[number] = Held()
        return number

    def held(self, sequence: int) -> Held:
        """What a sequence holds.

        Raises:
            KeyError: there is none of this number, or it was closed.
        """
        found = self._held.get(sequence)
        if found is None:
            raise KeyError(
                f"PagedCache: no sequence {sequence!r} is open (open: {sorted(self._held)})"
            )
        return found

    def sequences(self) -> tuple[int, ...]:
        """Numbers of the open sequences."""
        return tuple(self._held)

    def grow(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for ``counts`` more tokens of each sequence, or for none.

        Raises:
            OutOfPagesError: too few pages are free; nothing was changed.
        """
        held = [self.held(sequence) for sequence in sequences]
        wanted = [
            -(-(own.length + count) // self.page_size) - len(own.pages)
            for own, count in zip(held, counts, strict=True)
        ]
        needed = sum(wanted)
        if needed > len(self.free):
            raise OutOfPagesError(
                f"PagedCache: {needed} more pages are needed and {len(self.free)} of "
                f"{self.pages} are free; close() or cut() a sequence and plan again. Nothing was "
                "changed",
                needed,
                len(self.free),
            )
        for own, pages, count in zip(held, wanted, counts, strict=True):
            own.pages.extend(self.free.pop() for _ in range(pages))
            own.length += count

    def cut(self, sequence: int, length: int) -> None:
        """Forget what is behind a sequence's first ``length`` tokens.

        Raises:
            ValueError: it isn't that long.
        """
        own = self.held(sequence)
        if not isinstance(length, Integral) or not 0 <= length <= own.length:
            raise ValueError(
                f"PagedCache: argument 'length' is {length} (accepted: 0 to {own.length}, what "
                f"sequence {sequence} holds)"
            )
        keep = -(-length // self.page_size)
        self.free.extend(reversed(own.pages[keep:]))
        del own.pages[keep:]
        own.length = length

    def close(self, sequence: int) -> None:
        """End a sequence; its pages are free."""
        self.cut(sequence, 0)
        del self._held[sequence]
