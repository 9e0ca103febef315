"""Runs diffusion transformers of diffusers on torch_ops: `accelerate`, reversible, one call.

Only instances change, never a class, and nothing that diffusers keeps for the whole process.
"""

from __future__ import annotations

import torch
from torch import nn

from torch_ops.attention import AttentionBackend
from torch_ops.integrations.acceleration import Acceleration, carry_out, check_model
from torch_ops.integrations.extras import require

__all__ = ["Acceleration", "accelerate"]


def accelerate(
    model: nn.Module, *, attention: AttentionBackend | str | None = None
) -> Acceleration:
    """Put attention, norms and rotary embeddings of a diffusion transformer on torch_ops.

    Attention of Flux, Stable Diffusion 3, QwenImage and Wan gets a processor of its own in each
    module, so overrides find it as ``transformer_blocks.0.attn.processor.attention`` and reach no
    other model, whatever both share. Norms of PyTorch and diffusers are replaced wherever they
    are. Names in ``state_dict`` stay, parameters stay the same objects, and ``to()``,
    ``load_state_dict()``, LoRA layers, fused projections and `torch.compile` work as before.

    Inference only: gradients are refused, so gradient checkpointing has nothing to do. Masks of
    keys are honored (each module then waits for the device), in compiled code only those without a
    False; other masks are refused when they turn up, and so are diffusers' own ways to choose or
    to spread attention. Modules of unknown types, attention with processors of other types, such as
    those of IP adapters, which are loaded before, and what is accelerated already are left alone
    and listed.

    Args:
        model: A model of diffusers, such as a pipeline's ``transformer``, or a module with one.
        attention: Backend that the attention layers start with; None lets torch_ops choose.

    Returns:
        What was replaced, what was left and why; ``undo()`` puts everything back.

    Raises:
        MissingExtraError: diffusers isn't installed.
        TypeError: ``model`` isn't a module.
        ValueError: ``attention`` can't serve a layer of this model. Nothing was changed.
    """
    require(__name__, ("diffusers",), "pip install 'torch-ops[diffusers]'")
    from torch_ops.integrations.diffusers.known import KNOWN
    from torch_ops.integrations.diffusers.plan import Plan

    check_model(model)
    # Tensors made here must be plain ones, whatever mode the caller is in.
    with torch.inference_mode(False), torch.no_grad():
        plan = Plan(model, attention)
        return carry_out(model, plan.swaps, plan.left, KNOWN)
