"""Self-attention of decoder models on ``torch_ops.apply_rope`` and ``torch_ops.attention``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops.attention import Attention, AttentionBackend
from torch_ops.integrations.transformers.families import Family
from torch_ops.integrations.transformers.interface import refuse_dropout, refuse_weights
from torch_ops.integrations.transformers.masks import CausalMask, known_mask
from torch_ops.integrations.transformers.norm import RMSNorm
from torch_ops.integrations.transformers.paged import PagedCache
from torch_ops.integrations.transformers.projection import FusedLinears, run_linear, watched
from torch_ops.integrations.transformers.rope import refuse_positions

__all__ = ["SelfAttention"]


class SelfAttention(FusedLinears):
    """Causal self-attention with query, key and value as one product.

    The queries are the last tokens of the keys, whatever the cache holds: that is what a decoder
    with a growing cache needs. Where a batch is padded, a ragged call takes its tokens alone.
    """

    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(
        self, original: Any, family: Family, layers: int, backend: AttentionBackend | str | None
    ) -> None:
        super().__init__(original, family.projections, ("o_proj", "q_norm", "k_norm"))
        self.normalizes = hasattr(original, "q_norm")
        self.layer_idx = original.layer_idx
        self.layers = layers  # of the decoder
        self.num_heads = int(original.config.num_attention_heads)
        self.num_kv_heads = int(original.config.num_key_value_heads)
        self.head_dim = int(original.head_dim)
        self.dropout = float(getattr(original, "attention_dropout", 0.0))
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.num_kv_heads,
            scale=float(original.scaling),
            is_causal=True,
            window_left=family.window_left(original),
            logits_soft_cap=family.logits_soft_cap(original),
            backend=backend,
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: CausalMask | Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend; the arguments are those of the module that this one stands in for.

        Args:
            hidden_states: ``[B, S, hidden]``.
            position_embeddings: What `RotaryTable` returns.
            attention_mask: What `masks.causal_mask` returns, or None.
            cache: A cache of transformers, or None.
            past_key_values: Name of ``cache`` before transformers 5.20.
            **kwargs: Passed on by the decoder layer, not used.

        Returns:
            ``[B, S, hidden]`` and None in the place of attention weights.
        """
        cache = past_key_values if cache is None else cache
        refuse_weights(kwargs)
        refuse_dropout(self.dropout if self.training else 0.0)
        mask = None if attention_mask is None else known_mask(attention_mask)
        _refuse(mask, cache, self.attn.spec.window_left)
        batch, length = hidden_states.shape[:2]
        widths = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (
            part.flatten(0, 1).unflatten(-1, (-1, self.head_dim))
            for part in self.project(hidden_states).split(widths, dim=-1)
        )
        cos_sin_cache, positions = position_embeddings
        paged = isinstance(cache, PagedCache)
        if paged:
            self._begin_step(cache, batch, length, mask, k, positions)
        else:
            seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            _refuse_length(seen + length, cos_sin_cache.shape[0])
            if self.layer_idx == 0:  # the others get the same ones
                refuse_positions(positions, cos_sin_cache.shape[0])
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        if paged:
            out = cache.attend(
                self.layer_idx, batch, self._writable(q), k, v, cos_sin_cache, self.attn
            )
        else:
            q, k = torch.ops.torch_ops.apply_rope(q, k, cos_sin_cache, positions)
            q, k, v = (x.unflatten(0, (batch, length)) for x in (q, k, v))
            out = self._attend(q, k, v, cache, mask)
        out = out.reshape(batch, length, self.num_heads * self.head_dim)
        return run_linear(self.o_proj, out), None

    def _begin_step(
        self,
        cache: PagedCache,
        batch: int,
        length: int,
        mask: CausalMask | None,
        k: Tensor,
        positions: Tensor,
    ) -> None:
        """Begin the step in the first layer, which refuses positions that aren't the tokens'."""
        if self.layer_idx == 0:
            cache.check_model(self.layers, k)
        cache.step_for(self.layer_idx, batch, length, mask)
        if self.layer_idx == 0:
            cache.check_positions(positions)

    def _writable(self, q: Tensor) -> Tensor:
        """Give queries that nobody else has: a copy of what a hook or a foreign layer may keep."""
        if self.normalizes:
            fresh = type(self.q_norm) is RMSNorm and not watched(self.q_norm)
        else:
            layer = getattr(self, self.fused[0])
            fresh = len(self.fused) > 1 or (type(layer) is nn.Linear and not watched(layer))
        return q if fresh else q.clone()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Any, mask: CausalMask | None
    ) -> Tensor:
        """Attend to what the cache holds with these keys, ``[B, S, K, D]``."""
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        padding = None if mask is None else mask.padding
        if padding is None:
            out: Tensor = self.attn(q, k, v)
            return out
        return padding.attend(q, k, v, partial(self.attn, metadata=padding.metadata))


def _refuse(mask: CausalMask | None, cache: Any, window_left: int) -> None:
    """Raise for what this attention can't honor."""
    if mask is not None and mask.window_left != window_left:
        raise ValueError(
            f"attention_mask: received a window of {mask.window_left} tokens before a "
            f"query, accepted: {window_left}, as the layer was accelerated"
        )
    if getattr(cache, "is_compileable", False):
        raise ValueError(
            f"cache: received a {type(cache).__name__}, which hands out slots that are not filled "
            "yet; accepted: caches that return exactly the tokens so far, as DynamicCache does"
        )


def _refuse_length(length: int, max_position: int) -> None:
    if length > max_position:
        raise ValueError(
            f"position_ids: received {length} tokens, accepted: at most {max_position}, the "
            "model's max_position_embeddings"
        )
