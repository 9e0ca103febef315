"""Runs decoder models of transformers on torch_ops: `accelerate`, reversible, one call.

Only instances change, never a class. Once this is imported, transformers also knows the attention
implementation "torch_ops", for any model: see `interface.register_attention`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from torch_ops.attention import AttentionBackend
from torch_ops.integrations.acceleration import Acceleration, carry_out, check_model
from torch_ops.integrations.extras import require
from torch_ops.integrations.transformers.acceleration import forget_recorders
from torch_ops.integrations.transformers.families import KNOWN
from torch_ops.integrations.transformers.interface import register_attention

__all__ = ["Acceleration", "accelerate"]

if importlib.util.find_spec("transformers") is not None:
    register_attention()


def accelerate(
    model: nn.Module, *, attention: AttentionBackend | str | None = None
) -> Acceleration:
    """Put norms, gated blocks, experts, rotary embeddings and attention of a model on torch_ops.

    Names in ``state_dict`` stay, parameters stay the same objects, and ``to()``,
    ``load_state_dict()``, ``generate()`` and `torch.compile` work as before. Inference only:
    gradients are refused. Attention becomes causal over the whole cache, padded or not; packed
    sequences, static caches, ``output_attentions``, dropout and positions beyond the model's
    ``max_position_embeddings`` are refused when they turn up, and so is padding in compiled code.
    Modules of unknown types are left alone, and so are modules that are accelerated already. A
    model without attention of a known type gets a warning in the log, which names those.

    Args:
        model: A model of transformers, or a module that holds one.
        attention: Backend that the attention layers start with; None lets torch_ops choose.

    Returns:
        What was replaced, what was left and why; ``undo()`` puts everything back.

    Raises:
        MissingExtraError: transformers isn't installed.
        TypeError: ``model`` isn't a module.
        ValueError: ``attention`` can't serve a layer of this model. Nothing was changed.
    """
    require(__name__, ("transformers",), "pip install 'torch-ops[transformers]'")
    from torch_ops.integrations.transformers.plan import Plan

    check_model(model)
    # Tensors made here must be plain ones, whatever mode the caller is in.
    with torch.inference_mode(False), torch.no_grad():
        plan = Plan(model, attention)
        return carry_out(model, plan.swaps, plan.left, KNOWN, forget_recorders)
