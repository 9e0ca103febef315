"""`PagedCache`: keys and values of many sequences in pages of one pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_ops import dynamo
from torch_ops.errors import TorchOpsError
from torch_ops.integrations.transformers.cache import layer_sizes
from torch_ops.integrations.transformers.masks import CausalMask, Padding
from torch_ops.integrations.transformers.paged_layer import PagedLayer
from torch_ops.integrations.transformers.pages import OutOfPagesError, PagePool
from torch_ops.integrations.transformers.shifts import Shifts
from torch_ops.integrations.transformers.steps import Step, Steps

__all__ = ["OutOfPagesError", "PagedCache"]

_BEAMS = "PagedCache: beam search isn't served, pages belong to one sequence; use a DynamicCache"


class PagedCache(Cache):
    """A cache of sequences of any lengths that come and go, for accelerated models.

    A sequence holds only as many pages as it has tokens for. A step is planned outside of graphs;
    a compiled forward then serves every step of as many rows::

        a, b = cache.open(), cache.open()
        cache.plan([a, b], [5, 7])  # the next forward appends so many tokens to each
        model(prompts, cache=cache)  # [1, 12]: one prompt after the other
        cache.plan([a, b], [1, 1])
        model(last, cache=cache)  # [2, 1]
        cache.close(a)

    Positions are those of the tokens in their sequences; ``position_ids`` are not looked at. A
    forward that nobody planned takes its batch for the same sequences as the one before, opened at
    first: so does ``generate()``, with padded prompts too, whose padding is never stored.

    Args:
        config: The model's config.
        pages: Pages of each layer.
        page_size: Tokens of a page.
        dtype: Of keys and values, that of the model: float16, bfloat16, float32 or float64.
        device: Of keys and values.

    Raises:
        ValueError: a number or the dtype isn't accepted.
    """

    def __init__(
        self,
        config: Any,
        pages: int,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = layer_sizes("PagedCache", config, dtype)
        self.pool = PagePool(pages, page_size)
        self.step: Step | None = None
        self._positions = sizes.positions
        self._steps = Steps(self.pool, self.longest, torch.device(device))
        self._before: list[tuple[int, int]] = []
        self._batch: list[int] = []
        self._shifts = Shifts()
        self._columns = self._padded = 0
        self._new_columns: int | None = None
        shape = (pages, page_size, sizes.heads, sizes.head_dim)
        super().__init__(layers=[PagedLayer(shape, dtype, device) for _ in range(sizes.layers)])

    def open(self) -> int:
        """Begin a sequence without tokens; returns its number."""
        return self.pool.open()

    def close(self, sequence: int) -> None:
        """End a sequence and free its pages, also to make room for others.

        Raises:
            KeyError: it isn't open.
            ValueError: it is part of a step that no forward has followed yet.
        """
        self._refuse_planned(sequence)
        self.pool.close(sequence)

    def cut(self, sequence: int, length: int) -> None:
        """Forget what is behind a sequence's first ``length`` tokens, and free those pages.

        Raises:
            KeyError: it isn't open.
            ValueError: it is shorter, or part of a step that no forward has followed yet.
        """
        self._refuse_planned(sequence)
        self.pool.cut(sequence, length)

    def _refuse_planned(self, sequence: int) -> None:
        if any(sequence == planned for planned, _ in self._before):
            raise ValueError(
                f"PagedCache: sequence {sequence} is part of a planned step (accepted: others, "
                "until the forward ran or drop_plan() took it back)"
            )

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, with those of a step that is planned."""
        return self.pool.held(sequence).length

    @property
    def longest(self) -> int:
        """Most tokens that a sequence can have, by the model and by the pool."""
        return min(self.pool.pages * self.pool.page_size, self._positions)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self.pool.free)

    def plan(
        self, sequences: Sequence[int], counts: Sequence[int], *, rows: int | None = None
    ) -> None:
        """Say which sequences the next forward continues, by how many tokens each.

        Its input is these tokens, one sequence after the other, in any shape: ``[1, T]``, or
        ``[B, 1]``. A plan that no forward followed is taken back. The GPU isn't waited for: a step
        may be planned while the one before runs, on the same stream.

        Args:
            sequences: Numbers of open sequences, each once.
            counts: New tokens of each, >= 1.
            rows: Tokens of the input, where it is longer; what is behind the last sequence's is
                padding. One size for all steps lets one compiled graph serve them.

        Raises:
            OutOfPagesError: too few pages are free; nothing was changed.
            ValueError: numbers are out of range; nothing was changed.
            KeyError: a sequence isn't open; nothing was changed.
            CaptureError: a stream is capturing.
        """
        self.drop_plan()
        rows = self._checked(sequences, counts, rows)
        total = sum(counts)
        places = torch.arange(rows)
        places[total:] = -1
        self._plan(sequences, counts, places)
        self._new_columns = None

    def drop_plan(self) -> None:
        """Take back a plan that no forward followed."""
        for sequence, length in self._before:
            self.pool.cut(sequence, length)
        self._before, self.step, self._new_columns = [], None, None

    def _checked(self, sequences: Sequence[int], counts: Sequence[int], rows: int | None) -> int:
        whole = all(isinstance(count, Integral) and count > 0 for count in counts)
        total = sum(counts) if whole else 0
        rows = total if rows is None else rows
        for name, received, right in (
            ("sequences", list(sequences), len(set(sequences)) == len(sequences) > 0),
            ("counts", list(counts), whole and len(counts) == len(sequences)),
            ("rows", rows, isinstance(rows, Integral) and rows >= total),
        ):
            if not right:
                raise ValueError(
                    f"PagedCache: argument {name!r} is {received} (accepted: open sequences, each "
                    f"once, as many counts >= 1, and rows for all {total} tokens)"
                )
        for sequence, count in zip(sequences, counts, strict=True):
            if self.length(sequence) + count > self._positions:
                raise ValueError(
                    f"PagedCache: sequence {sequence} would have {self.length(sequence) + count} "
                    f"tokens (accepted: at most {self._positions}, the model's "
                    "max_position_embeddings)"
                )
        return rows

    def _plan(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],
        places: Tensor,
    ) -> None:
        """Grow the sequences and describe the step, or change nothing.

        Args:
            sequences, counts: As `plan` takes them.
            places: As `Steps.describe` takes them.
        """
        held = [self.pool.held(sequence) for sequence in sequences]
        before = [(s, own.length) for s, own in zip(sequences, held, strict=True)]
        self.pool.grow(sequences, counts)
        try:
            self.step = self._steps.describe(held, list(counts), places)
        except BaseException:
            for sequence, length in before:
                self.pool.cut(sequence, length)
            raise
        self._before = before

    def check_model(self, layers: int, k: Tensor) -> None:
        """Raise unless the cache is of a model like this.

        Args:
            layers: How many the model has.
            k: Keys of one, ``[T, K, D]``.

        Raises:
            ValueError: it has others; a step would never end, or end too early.
        """
        layer = self.layers[0]
        assert isinstance(layer, PagedLayer)
        pages: Tensor = layer.keys
        ours = len(self.layers), *pages.shape[2:], pages.dtype
        received = layers, *k.shape[1:], k.dtype
        if ours != received:
            names = ", ".join(f"{name} {{}}" for name in ("layers", "heads", "head_dim", "dtype"))
            raise ValueError(
                f"PagedCache: received keys of a model with {names.format(*received)}, accepted: "
                f"{names.format(*ours)}, as the cache was made"
            )

    def check_positions(self, given: Tensor) -> None:
        """Raise where a batch that nobody planned has positions that aren't its tokens'.

        Args:
            given: ``[B * S]``; the cache has its own.

        Raises:
            ValueError: the distances are others; nothing was changed.
        """
        if self._new_columns is None or self.step is None:
            return
        try:
            self._shifts.check(self._batch, given, self.step)
        except ValueError:
            self.drop_plan()
            if not self._columns:
                self._forget_batch()
            raise

    def _forget_batch(self) -> None:
        for sequence in self._batch:
            self.close(sequence)
        self._batch = []

    def step_for(self, layer_idx: int, batch: int, length: int, mask: CausalMask | None) -> Step:
        """Give a layer the step of a forward over ``[batch, length]``; plans it if nobody has.

        Raises:
            ValueError: a planned step is of other sizes, or the batch has changed.
            OutOfPagesError: as `plan`.
            TorchOpsError: nobody planned and the forward is compiled.
        """
        padding = None if mask is None else mask.padding
        if layer_idx == 0 and self._new_columns is not None:
            self.drop_plan()  # of a forward that was broken off
        if self.step is None:
            if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise():
                raise TorchOpsError("PagedCache: call plan() before a compiled forward")
            self._plan_batch(batch, length, padding)
        elif padding is not None and self._new_columns is None:
            raise ValueError(
                "attention_mask: received one with padding for a planned step, accepted: None; "
                "plan the tokens alone"
            )
        step = self.step
        assert step is not None
        if step.slots.shape[0] != batch * length:
            raise ValueError(
                f"PagedCache: received {batch * length} tokens, accepted: {step.slots.shape[0]}, "
                "as planned"
            )
        return step

    def _plan_batch(self, batch: int, length: int, padding: Padding | None) -> None:
        """Plan a forward over a batch: the same sequences in each, padded where the mask says."""
        if self._batch and len(self._batch) != batch:
            raise ValueError(
                f"PagedCache: received a batch of {batch}, accepted: {len(self._batch)}, as "
                "before; reset() the cache, or plan()"
            )
        real = torch.ones(batch, length, dtype=torch.bool) if padding is None else padding.asked
        opened = [] if self._batch else [self.open() for _ in range(batch)]
        sequences, counts = opened or self._batch, real.sum(1).tolist()
        some = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        places = real.flatten().long().cumsum(0).sub(1).masked_fill(~real.flatten(), -1)
        try:
            self._checked([s for s, _ in some], [n for _, n in some], None)
            self._plan([s for s, _ in some], [n for _, n in some], places)
        except BaseException:
            for sequence in opened:
                self.close(sequence)
            raise
        self._batch, self._new_columns = list(sequences), length
        if not real.all():
            self._padded = self._columns + length

    def attend(
        self,
        layer_idx: int,
        batch: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin_cache: Tensor,
        attention: Callable[..., Tensor],
    ) -> Tensor:
        """Rotate a layer's queries and keys, append, and attend to its sequences' pages.

        Args:
            layer_idx: Which layer; the last one ends the step.
            batch, q, k, v, cos_sin_cache, attention: As `PagedLayer.attend` takes them.
        """
        step, layer = self.step, self.layers[layer_idx]
        assert step is not None
        assert isinstance(layer, PagedLayer)
        out = layer.attend(step, batch, q, k, v, cos_sin_cache, attention)
        if layer_idx == len(self.layers) - 1:
            if self._new_columns is not None:
                self._columns += self._new_columns
            self.step, self._before, self._new_columns = None, [], None
        return out

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding among them; 0 before a planned step."""
        return self._columns if self.step is None or self._new_columns is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a batch's queries see and where they start; only theirs, if planned."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """End all sequences."""
        self.drop_plan()
        for sequence in self.pool.sequences():
            self.close(sequence)
        self._batch, self._columns, self._padded, self._shifts = [], 0, 0, Shifts()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of a batch that nobody planned.

        Raises:
            ValueError: there is padding among them, less than so many, or a positive number.
        """
        if self._new_columns is not None:
            self.drop_plan()  # of a forward that was broken off
        removed = -int(tokens_to_remove)  # transformers 5.17 gives a tensor
        most = self._columns - self._padded
        if removed and not 0 < removed <= most:
            raise ValueError(
                f"PagedCache: crop of {-removed} (accepted: 0 to {-most}, the tokens behind the "
                "last padding)"
            )
        for sequence in self._batch:
            self.cut(sequence, self.length(sequence) - removed)
        self._columns -= removed

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refuse: beams would share pages."""
        raise ValueError(_BEAMS)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse likewise."""
        raise ValueError(_BEAMS)

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refuse likewise."""
        raise ValueError(_BEAMS)
