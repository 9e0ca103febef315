"""What is known about classes of diffusers: which module is what, and when it fits.

Classes are known by their exact names, so nothing of diffusers is imported and a subclass, which
may compute something else, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_ops.integrations.acceleration import obstacle_on
from torch_ops.integrations.diffusers.attention import (
    FluxProcessor,
    Processor,
    QwenImageProcessor,
    SD3Processor,
    WanProcessor,
)
from torch_ops.integrations.diffusers.norm import LayerNorm, RMSNorm, WideningRMSNorm

__all__ = [
    "KNOWN",
    "ROPES",
    "Form",
    "attends",
    "attention_misfit",
    "class_of",
    "form_of",
    "norm_maker",
    "norm_misfit",
    "unknown",
]

_MODELS = "diffusers.models"
_ATTENTION = f"{_MODELS}.attention_processor.Attention"
_FLUX = f"{_MODELS}.transformers.transformer_flux"
_SD3 = f"{_MODELS}.transformers.transformer_sd3"
_QWEN = f"{_MODELS}.transformers.transformer_qwenimage"
_WAN = f"{_MODELS}.transformers.transformer_wan"


@dataclass(frozen=True)
class Form:
    """A kind of attention.

    Attributes:
        module: Class of its modules.
        processor: Class of their processors.
        blocks: Classes of what holds such modules, and calls them with what is known.
        replacement: Takes the place of the processor.
        rope_at: Where a model keeps what makes the embedding of positions; empty for none.
        ropes: Classes of that.
    """

    module: str
    processor: str
    blocks: tuple[str, ...]
    replacement: type[Processor]
    rope_at: str = ""
    ropes: tuple[str, ...] = ()


_FORMS = {
    "Flux": Form(
        f"{_FLUX}.FluxAttention",
        f"{_FLUX}.FluxAttnProcessor",
        (f"{_FLUX}.FluxTransformerBlock", f"{_FLUX}.FluxSingleTransformerBlock"),
        FluxProcessor,
        "pos_embed",
        (f"{_FLUX}.FluxPosEmbed",),
    ),
    "SD3": Form(
        _ATTENTION,
        f"{_MODELS}.attention_processor.JointAttnProcessor2_0",
        (f"{_MODELS}.attention.JointTransformerBlock", f"{_SD3}.SD3SingleTransformerBlock"),
        SD3Processor,
    ),
    "QwenImage": Form(
        _ATTENTION,
        f"{_QWEN}.QwenDoubleStreamAttnProcessor2_0",
        (f"{_QWEN}.QwenImageTransformerBlock",),
        QwenImageProcessor,
        "pos_embed",
        (f"{_QWEN}.QwenEmbedRope", f"{_QWEN}.QwenEmbedLayer3DRope"),
    ),
    "Wan": Form(
        f"{_WAN}.WanAttention",
        f"{_WAN}.WanAttnProcessor",
        (f"{_WAN}.WanTransformerBlock",),
        WanProcessor,
        "rope",
        (f"{_WAN}.WanRotaryPosEmbed",),
    ),
}
KNOWN = tuple(_FORMS)
ROPES = frozenset(rope for form in _FORMS.values() for rope in form.ropes)
_NORMS: dict[str, Callable[[Any], nn.Module]] = {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm,
    f"{_MODELS}.normalization.FP32LayerNorm": LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": RMSNorm,
    f"{_MODELS}.normalization.RMSNorm": WideningRMSNorm,
}


def class_of(value: object) -> str:
    """Full name of the class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def attends(module: nn.Module) -> bool:
    """Whether this is attention with a processor, as diffusers has it."""
    return hasattr(module, "set_processor") and hasattr(module, "processor")


def form_of(attention: Any) -> Form | None:
    """Return the kind of a module that `attends`, or None for an unknown one."""
    classes = class_of(attention), class_of(attention.processor)
    for form in _FORMS.values():
        if (form.module, form.processor) == classes:
            return form
    return None


def attention_misfit(attention: Any, form: Form | None, block: nn.Module | None) -> str | None:
    """Say why attention can't be replaced, or None if it can.

    Args:
        attention: A module that `attends`.
        form: Its kind.
        block: What holds it; None where that isn't part of the model.
    """
    processor = attention.processor
    if form is None:
        return f"unknown type {class_of(attention)} with the processor {class_of(processor)}"
    if block is not None and class_of(block) not in form.blocks:
        return f"it is in a block of unknown type {class_of(block)}"
    chosen = getattr(processor, "_attention_backend", None)
    if chosen is not None:
        return f"set_attention_backend chose {chosen} for it: call reset_attention_backend()"
    if getattr(processor, "_parallel_config", None) is not None:
        return "enable_parallelism spread it over devices"
    width = getattr(attention, "inner_kv_dim", getattr(attention, "kv_inner_dim", None))
    if width not in (None, attention.inner_dim):
        return f"its keys are {width} wide and its queries {attention.inner_dim}"
    if form is _FORMS["Wan"] and attention.add_k_proj is not None:
        return "it attends to an image beside the text"
    return None


def norm_maker(module: nn.Module) -> Callable[[Any], nn.Module] | None:
    """Return what makes the replacement of a norm, or None for other modules."""
    return _NORMS.get(class_of(module))


def norm_misfit(norm: Any) -> str | None:
    """Say why a norm of a known type can't be replaced, or None if it can."""
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", ()))
    if len(shape) != 1:
        return f"it normalizes over {len(shape)} dimensions"
    if norm.eps is None:
        return "its eps is None, which depends on the dtype of a call"
    if norm_maker(norm) is WideningRMSNorm and norm.bias is not None:
        return "it has a bias, which rms_norm has not"
    return obstacle_on(norm)


def unknown(module: nn.Module) -> str | None:
    """Say why a module that is neither attention, norm nor embedding stays, or None for silence.

    What PyTorch computes, products and activations, stays, and so does what diffusers puts together
    of parts that are decided one by one.
    """
    cls = type(module)
    if cls.__module__.startswith("torch.nn."):
        return f"no op computes {cls.__qualname__}" if "Norm" in cls.__qualname__ else None
    if cls.__module__.startswith("diffusers.") and next(module.children(), None) is not None:
        return None
    return f"unknown type {class_of(module)}"
