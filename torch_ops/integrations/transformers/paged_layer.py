"""Keys and values of one layer of a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from torch_ops.integrations.transformers.steps import Step

__all__ = ["PagedLayer"]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Pages of one layer, ``[P, page_size, K, D]``."""

    keys: Any  # never None here, as it may be in the base class
    values: Any

    is_compileable = False  # what transformers calls so hands out unfilled slots
    is_croppable = True
    is_sliding = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.is_initialized = True
        if self.keys.is_cuda:  # else CUDA graphs refuse inputs that are written
            for pages in (self.keys, self.values):
                torch._dynamo.mark_static_address(pages)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is allocated on construction."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a page table says where keys are, which the model's own attention can't read."""
        raise ValueError(
            "PagedCache: received by attention that isn't accelerated, accepted: models after "
            "accelerate(model); print what it returned to see why a layer was left"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not asked of a layer: all have the same."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Not asked of a layer: all have the same."""
        return 0

    def get_max_length(self) -> int:
        """Number of slots."""
        return int(self.keys.shape[0] * self.keys.shape[1])

    def attend(
        self,
        step: Step,
        batch: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin_cache: Tensor,
        attention: Callable[..., Tensor],
    ) -> Tensor:
        """Rotate queries and keys, append keys and values, and attend to the sequences' pages.

        Args:
            step: Of the forward.
            batch: Rows of the input, ``[B, S]``.
            q: ``[T, H, D]``; may be written over.
            k, v: ``[T, K, D]``.
            cos_sin_cache: As `RotaryTable` gives it.
            attention: An `Attention` layer.

        Returns:
            ``[T, H, D]``, zeros in rows of padding.
        """
        ops, pages = torch.ops.torch_ops, (self.keys, self.values, step.slots)
        if batch == step.fresh:
            q, k = ops.apply_rope(q, k, cos_sin_cache, step.positions)
            ops.append_paged_kv_(k, v, *pages)
            return attention(*(x.unflatten(0, (batch, -1)) for x in (q, k, v))).flatten(0, 1)
        ops.apply_rope_append_paged_kv_(q, k, v, cos_sin_cache, step.positions, *pages)
        if step.real is None:
            return attention(q, self.keys, self.values, step.metadata)
        packed = attention(q[step.real], self.keys, self.values, step.metadata)
        out = packed.new_zeros(q.shape)
        out[step.real] = packed
        return out
