"""The attention implementation "torch_ops" of transformers: causal, and no mask at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops import dynamo

__all__ = ["IMPLEMENTATION", "register"]

IMPLEMENTATION = "torch_ops"

_PADDED = (
    "attention_mask: received one with padding (a 0 among its entries), accepted: None or all "
    "ones; the accelerated attention is causal over the whole cache. Run prompts of different "
    "lengths one by one instead of padded, or undo() the acceleration"
)
_NOT_CAUSAL = (
    "attention mask: received a pattern that is not causal (packed sequences, blocks or a custom "
    "mask function), accepted: causal, within the layer's window; undo() the acceleration to use it"
)
_WEIGHTS = (
    "config.output_attentions: received True, accepted: False; the accelerated attention never "
    "stores its weights. undo() the acceleration to look at them"
)
_STATIC = (
    "cache: received one with slots that are not filled yet (a static cache), accepted: caches "
    "that return exactly the tokens so far, as DynamicCache does"
)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. Adds a name and changes nothing else."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(
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
) -> None:
    """Return None, the mask of a causal layer, or raise if a mask would be needed."""
    from transformers.masking_utils import causal_mask_function

    if getattr(config, "output_attentions", False):
        raise ValueError(_WEIGHTS)
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(_STATIC)
    if attention_mask is not None:
        _require(attention_mask.all(), _PADDED)
    if mask_function is causal_mask_function:
        return
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
    _require(~(mask ^ expected).any(), _NOT_CAUSAL)


def _require(condition: Tensor, message: str) -> None:
    """Raise unless ``condition``: at once in eager code, when it runs in compiled code."""
    if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
