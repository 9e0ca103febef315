"""Masks of keys: what is padding isn't attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import dynamo
from torch_ops.attention import Attention, AttentionMetadata

__all__ = ["attend_to_real"]

_COMPILED = (
    "attention_mask: received one with a False among its entries, accepted in compiled code: None "
    "or all True; run prompts of different lengths uncompiled"
)


def attend_to_real(layer: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend all queries to the keys that a mask lets through, by one ragged call.

    Looks at the mask, which waits for its device.

    Args:
        layer: Without causality.
        q, k, v: ``[B, S_q, H, D]`` and ``[B, S, H, D]``.
        mask: ``[B, S]`` or ``[B, 1, 1, S]`` bool, True where a key is attended to.

    Returns:
        As ``q``; zeros where a sequence has no key.

    Raises:
        ValueError: it is another mask; in compiled code also if it has a False, when that runs.
    """
    batch, keys = k.shape[:2]
    if mask.dtype != torch.bool or mask.shape not in ((batch, keys), (batch, 1, 1, keys)):
        raise ValueError(
            f"attention_mask: received {mask.dtype} of shape {list(mask.shape)}, accepted: None, "
            f"or torch.bool of shape [{batch}, {keys}] or [{batch}, 1, 1, {keys}], True for keys "
            "that count; undo() the acceleration for others"
        )
    real = mask.reshape(batch, keys)
    traced = torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise()
    if traced:
        torch._assert_async(real.all(), _COMPILED)
    if traced or real.all():
        out: Tensor = layer(q, k, v)
        return out
    asked = q.shape[1]
    metadata = AttentionMetadata.ragged([asked] * batch, real.sum(1).tolist(), device=q.device)
    places = real.flatten().nonzero().flatten()
    packed = (x.flatten(0, 1).index_select(0, places) for x in (k, v))
    ragged: Tensor = layer(q.flatten(0, 1), *packed, metadata).unflatten(0, (batch, asked))
    return ragged
