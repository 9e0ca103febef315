"""What the attention layers read in a forward over a paged cache, and its description."""

from __future__ import annotations

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
        self._decodes: dict[int, Step] = {}

    def describe(self, held: list[Held], counts: list[int], places: list[int]) -> Step:
        """Describe the step that made sequences as long as they are.

        Args:
            held: The sequences.
            counts: How many of their last tokens are new.
            places: For each row of the input the number of its token among the new ones, -1 for
                padding.
        """
        numbers = self._numbers(held, counts, places)
        lens = counts, [own.length for own in held], [own.pages for own in held]
        total = sum(counts)
        packed = places[:total] == list(range(total))
        if packed and max(counts) == 1:
            step = self._decode(len(places))
            step.metadata.plan(*lens)
            step.slots.copy_(numbers[0])
            step.positions.copy_(numbers[1])
            return step
        pages, size = self._pool.pages, self._pool.page_size
        metadata = AttentionMetadata.paged(
            *lens, page_size=size, num_pages=pages, device=self._device
        )
        slots, positions = numbers.to(self._device)
        rows = [row for row, place in enumerate(places) if place >= 0]
        real = None if packed else torch.tensor(rows, device=self._device)
        alike = packed and len(places) == total and len(set(counts)) == 1
        fresh = len(held) if alike and counts == lens[1] else 0
        return Step(slots, positions, metadata, real, fresh)

    def _numbers(self, held: list[Held], counts: list[int], places: list[int]) -> Tensor:
        """Give slots and positions, ``[2, T]``."""
        size = self._pool.page_size
        tokens = [
            (own.pages[position // size] * size + position % size, position)
            for own, count in zip(held, counts, strict=True)
            for position in range(own.length - count, own.length)
        ]
        rows = [tokens[place] if place >= 0 else (-1, 0) for place in places]
        return torch.tensor(rows, dtype=torch.int64).t().contiguous()

    def _decode(self, rows: int) -> Step:
        step = self._decodes.get(rows)
        if step is None:
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
            slots, positions = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
            step = self._decodes[rows] = Step(slots, positions, metadata)
        return step
