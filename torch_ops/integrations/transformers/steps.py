"""What the attention layers read in a forward over a paged cache, and its description."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops.attention import AttentionMetadata
from torch_ops.integrations.transformers.pages import Held, PagePool

__all__ = ["Step", "Steps"]


class Step(NamedTuple):
    """What the attention layers read in a forward.

    Attributes:
        slots: ``[T]`` int64, where each token is written; negative for padding.
        positions: ``[T]`` int64, of each token in its sequence.
        metadata: Lengths and pages.
        real: ``[N]`` int64, which of the T rows are tokens; None for the first ones.
        fresh: How many sequences there are, where all begin with this step, are equally long and
            fill the rows; else 0. Pages needn't be read then.
    """

    slots: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    real: Tensor | None = None
    fresh: int = 0


class Steps:
    """Describes steps; those of one token each keep their tables where graphs read them.

    Args:
        pool: Whose pages.
        longest: Most tokens of a sequence.
        device: Where the layers are.
    """

    def __init__(self, pool: PagePool, longest: int, device: torch.device) -> None:
        self._pool, self._longest, self._device = pool, longest, device
        self._decodes: dict[int, tuple[Step, Tensor]] = {}

    def describe(self, held: list[Held], counts: list[int], places: Tensor) -> Step:
        """Describe the step that made sequences as long as they are.

        Args:
            held: The sequences.
            counts: How many of their last tokens are new.
            places: ``[T]`` int64, for each row of the input the number of its token among the new
                ones, -1 for padding.
        """
        lens = counts, [own.length for own in held], [own.pages for own in held]
        total = sum(counts)
        packed = torch.equal(places[:total], torch.arange(total))
        if packed and max(counts) == 1:
            step, target = self._decode(len(places))
            step.metadata.plan(*lens)
            numbers = self._last(held, len(places))
            # Pinned and new each time: nobody waits for the copy, which is before the step in line.
            staged = numbers.pin_memory() if target.is_cuda else numbers
            target.copy_(staged, non_blocking=True)
            return step
        pages, size = self._pool.pages, self._pool.page_size
        metadata = AttentionMetadata.paged(
            *lens, page_size=size, num_pages=pages, device=self._device
        )
        slots, positions = self._numbers(held, counts, places).to(self._device)
        real = None if packed else (places >= 0).nonzero().flatten().to(self._device)
        alike = packed and len(places) == total and len(set(counts)) == 1
        fresh = len(held) if alike and counts == lens[1] else 0
        return Step(slots, positions, metadata, real, fresh)

    def _last(self, held: list[Held], rows: int) -> Tensor:
        """Give slots and positions of each sequence's last token, ``[2, rows]``.

        A loop: for so few numbers it takes less than the calls of `_numbers`.
        """
        size, last = self._pool.page_size, [own.length - 1 for own in held]
        slots = [
            own.pages[at // size] * size + at % size for own, at in zip(held, last, strict=True)
        ]
        rest = rows - len(held)
        return torch.tensor([[*slots, *[-1] * rest], [*last, *[0] * rest]])

    def _numbers(self, held: list[Held], counts: list[int], places: Tensor) -> Tensor:
        """Give slots and positions, ``[2, T]``."""
        size, pages = self._pool.page_size, array("i")
        for own in held:
            pages.extend(own.pages)
        new, lengths, widths = torch.tensor(
            [counts, [own.length for own in held], [len(own.pages) for own in held]]
        )
        # Of a sequence: its first new token less their number before it; where its pages begin.
        shift, begin = lengths - new.cumsum(0), widths.cumsum(0) - widths
        sequence = torch.repeat_interleave(new)
        positions = torch.arange(len(sequence)) + shift[sequence]
        listed = torch.frombuffer(pages, dtype=torch.int32)
        page = listed[begin[sequence] + positions // size]
        tokens = torch.stack((page.long() * size + positions % size, positions))
        rows = tokens[:, places.clamp(min=0)]
        padding = torch.tensor([[-1], [0]])
        return torch.where(places < 0, padding, rows)

    def _decode(self, rows: int) -> tuple[Step, Tensor]:
        """Give the step of so many rows, and what its slots and positions are the rows of."""
        found = self._decodes.get(rows)
        if found is None:
            metadata = AttentionMetadata.paged(
                [1] * rows,
                [0] * rows,
                [[] for _ in range(rows)],
                page_size=self._pool.page_size,
                num_pages=self._pool.pages,
                device=self._device,
                max_kv_len=self._longest,
                max_pages=self._pool.pages,
            )
            target = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
            found = self._decodes[rows] = Step(target[0], target[1], metadata), target
        return found
