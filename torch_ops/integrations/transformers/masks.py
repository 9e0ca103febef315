"""The masks of attention through torch_ops: a window and what is padding, no matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import dynamo, once
from torch_ops.attention import AttentionMetadata

__all__ = ["CausalMask", "Padding", "causal_mask", "known_mask", "require"]

_COMPILED = (
    "attention_mask: received one with padding (a 0 among its entries), accepted in compiled code: "
    "None or all ones; run prompts of different lengths uncompiled, or with a PagedCache"
)
_NOT_CAUSAL = (
    "attention mask: received a pattern that is not causal (packed sequences, blocks or a custom "
    "mask function), accepted: causal, within the layer's window; use another attn_implementation, "
    "or undo() the acceleration"
)
_WEIGHTS = (
    "config.output_attentions: received True, accepted: False; attention through torch_ops never "
    "stores its weights. Use attn_implementation='eager', or undo() the acceleration"
)
_STATIC = (
    "cache: received one with slots that are not filled yet (a static cache), accepted: caches "
    "that return exactly the tokens so far, as DynamicCache does"
)


class Padding:
    """Which tokens of a padded batch are real, and the ragged call that takes those alone.

    Args:
        seen: ``[B, S_kv]``, False where there is padding.
        queries: How many of the last columns are queries, S_q.
        window_left: Of the layers that will use it.

    Raises:
        ValueError: a sequence has a gap and the window would have to reach across it.
    """

    def __init__(self, seen: Tensor, queries: int, window_left: int) -> None:
        rows = seen.cpu()  # the only look at the device
        self._shape = (*rows.shape, queries)
        if window_left >= 0:
            _refuse_gaps(rows)
        self.asked = rows[:, rows.shape[1] - queries :]  # on the host
        self.keys = _places(rows, seen.device)
        self.queries = _places(self.asked, seen.device)
        self.metadata = AttentionMetadata.ragged(
            self.asked.sum(1).tolist(), rows.sum(1).tolist(), device=seen.device
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, run: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Attend ``[B, S_q, H, D]`` queries; rows of padding are zeros.

        Args:
            q, k, v: With padding; keys and values ``[B, S_kv, K, D]``.
            run: Takes packed ``[T, H, D]`` queries and ``[N, K, D]`` keys and values.
        """
        batch, length, asked = self._shape
        if (batch, length, asked) != (k.shape[0], k.shape[1], q.shape[1]):
            raise ValueError(
                f"attention_mask: made for {batch} sequences of {length} keys and {asked} queries, "
                f"received {k.shape[0]} of {k.shape[1]} and {q.shape[1]}"
            )
        packed = run(q.flatten(0, 1)[self.queries], *(x.flatten(0, 1)[self.keys] for x in (k, v)))
        out = packed.new_zeros(batch * asked, *packed.shape[1:])
        out[self.queries] = packed
        return out.view(batch, asked, *packed.shape[1:])


class CausalMask(NamedTuple):
    """What the attention of torch_ops gets as its mask.

    Attributes:
        window_left: Keys before its own that a query attends to, -1 for all.
        padding: None where nothing is padded.
    """

    window_left: int = -1
    padding: Padding | None = None


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> CausalMask:
    """Describe the mask that transformers asks for, by the parameters of its mask functions.

    Raises:
        ValueError: It isn't causal with a window and padding, or can't be honored.
    """
    from transformers.masking_utils import causal_mask_function

    if getattr(config, "output_attentions", False):
        raise ValueError(_WEIGHTS)
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(_STATIC)
    window_left = -1
    if mask_function is not causal_mask_function:
        window_left = -1 if local_size is None else local_size - 1
        if mask_function is None or use_vmap:
            raise ValueError(_NOT_CAUSAL)
        batch = torch.arange(batch_size, device=device)[:, None, None, None]
        query = torch.arange(q_length, device=device)[:, None] + q_offset
        key = torch.arange(kv_length, device=device) + kv_offset
        expected = key <= query
        if local_size is not None:
            expected = expected & (key > query - local_size)
        mask = mask_function(batch, torch.zeros_like(batch), query, key)
        # Inductor of torch 2.13 fails on == of booleans.
        require(~(mask ^ expected).any(), _NOT_CAUSAL)
    if attention_mask is None:
        return CausalMask(window_left)
    if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch_size):
        raise ValueError(
            f"attention_mask: received shape {list(attention_mask.shape)}, accepted: "
            f"[{batch_size}, {kv_offset + kv_length}], or another attn_implementation"
        )
    attention_mask = attention_mask.expand(batch_size, -1)
    if attention_mask.shape[1] < kv_offset + kv_length:
        raise ValueError(
            f"attention_mask: received one for {attention_mask.shape[1]} tokens, accepted: for all "
            f"{kv_offset + kv_length}, those in the cache among them"
        )
    if _traced():
        torch._assert_async(attention_mask.all(), _COMPILED)
        return CausalMask(window_left)
    seen = attention_mask[:, kv_offset : kv_offset + kv_length]
    if seen.all():
        return CausalMask(window_left)
    return CausalMask(window_left, Padding(seen, q_length, window_left))


def known_mask(mask: CausalMask | Tensor) -> CausalMask:
    """Give a mask that `causal_mask` made.

    Raises:
        ValueError: it is another one, such as a matrix of a user's own.
    """
    if isinstance(mask, CausalMask):
        return mask
    raise ValueError(
        f"attention_mask: received a mask of shape {tuple(mask.shape)}, accepted: None, or one of "
        "two dimensions, ones and zeros for tokens and padding; use another attn_implementation, "
        "or undo() the acceleration"
    )


def _places(rows: Tensor, device: torch.device) -> Tensor:
    return rows.flatten().nonzero().flatten().to(device)


def _refuse_gaps(rows: Tensor) -> None:
    """Refuse padding between tokens of a sequence, which the model's own mask counts as keys."""
    real = rows.long()
    begun, rest = real.cumsum(1) > 0, real.flip(1).cumsum(1).flip(1) > 0
    if (begun & rest & ~rows).any():
        raise ValueError(
            "attention_mask: received one with padding between the tokens of a sequence, accepted "
            "in layers with a sliding window: padding before and behind them; pad prompts on the "
            "left to generate"
        )


def _traced() -> bool:
    return torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise()


def require(condition: Tensor, message: str) -> None:
    """Raise unless ``condition``: at once in eager code, when it runs in compiled code.

    A CUDA graph that is being captured raises when it is replayed.
    """
    if _traced() or once.capturing():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
