"""The attention implementation "torch_ops" of transformers, for any of its models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ops.integrations.extras import require
from torch_ops.integrations.transformers.masks import CausalMask, causal_mask, known_mask

__all__ = [
    "IMPLEMENTATION",
    "attention_forward",
    "refuse_dropout",
    "refuse_weights",
    "register_attention",
]

IMPLEMENTATION = "torch_ops"
# Arguments that change what attention computes, and that no op takes.
_UNKNOWN = ("position_bias", "s_aux", "block_table", "cu_seq_lens_q", "cu_seq_lens_k")


def register_attention() -> None:
    """Make ``attn_implementation="torch_ops"`` known to transformers, with its masks.

    A model that uses it calls ``torch_ops.attention``, or ``torch_ops.varlen_attention`` where its
    batch is padded; ``use_backend`` and the like choose the kernels. Attention that is causal over
    the tokens so far, or that has no mask, is served: with windows and caps of the logits, padded
    on either side, with caches that hand out the tokens so far. What else turns up, such as a
    static cache or ``output_attentions``, is refused. Adds a name, and changes nothing else.

    Raises:
        MissingExtraError: transformers isn't installed.
    """
    require(__name__, ("transformers",), "pip install 'torch-ops[transformers]'")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, causal_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, by the parameters of transformers' attention functions.

    Args:
        module: The attention module that calls.
        query: ``[B, H, S_q, D]``.
        key, value: ``[B, K, S_kv, D]``.
        attention_mask: What `causal_mask` returns, or None for none but the module's.
        dropout: Must be 0.
        scaling: Multiplier of the logits; default ``D ** -0.5``.
        sliding_window: Keys that a query attends to, its own among them.
        softcap: Cap of the logits.
        is_causal: Of calls without a mask; default what the module says.
        **kwargs: Passed on by the layers; not used, but for what would change the result.

    Returns:
        ``[B, S_q, H, D]`` and None in the place of attention weights.

    Raises:
        ValueError: something can't be honored.
    """
    refuse_weights(kwargs)
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: received one, accepted: None by attention of torch_ops")
    refuse_dropout(dropout)
    mask = _mask(module, attention_mask, sliding_window, is_causal)
    causal = attention_mask is not None or _causal(module, is_causal)
    numbers = causal, scaling, mask.window_left, float(softcap or 0.0)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask.padding is None:
        return torch.ops.torch_ops.attention(q, k, v, *numbers), None
    tables = mask.padding.metadata.tables
    bounds = tables.qo_indptr, tables.kv_indptr, tables.max_qo_len, tables.max_kv_len

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.torch_ops.varlen_attention(q, k, v, *bounds, *numbers)
        return out

    return mask.padding.attend(q, k, v, packed), None


def refuse_dropout(dropout: float) -> None:
    """Raise unless nothing is to be dropped."""
    if dropout:
        raise ValueError(f"dropout: received {dropout}, accepted: 0.0; call eval() on the model")


def refuse_weights(kwargs: dict[str, Any]) -> None:
    """Raise where attention weights are asked for."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions: received True, accepted: False; attention through torch_ops never "
            "stores its weights. Use attn_implementation='eager', or undo() the acceleration"
        )


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _mask(
    module: torch.nn.Module,
    mask: CausalMask | Tensor | None,
    sliding_window: int | None,
    is_causal: bool | None,
) -> CausalMask:
    """Give what is known of the mask, after a look at whether the layer means the same."""
    window_left = -1 if sliding_window is None else sliding_window - 1
    if mask is None:
        return CausalMask(window_left if _causal(module, is_causal) else -1)
    mask = known_mask(mask)
    if not _causal(module, is_causal):
        raise ValueError("is_causal: received False with a causal mask, accepted: True")
    if sliding_window is not None and mask.window_left not in (-1, window_left):
        raise ValueError(
            f"sliding_window: received {sliding_window} for a mask of {mask.window_left + 1}"
        )
    return mask if mask.window_left >= 0 else mask._replace(window_left=window_left)
