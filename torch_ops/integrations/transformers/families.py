"""What is known about model classes of transformers: which module is what, and when it fits.

Classes are known by their exact name, so nothing of transformers is imported and a subclass, which
may compute something else, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_ops.integrations.transformers.mlp import GATES
from torch_ops.integrations.transformers.projection import unfusable

__all__ = ["KNOWN", "Role", "misfit", "only_records", "plain_linear", "role_of", "window_left"]

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
KNOWN = tuple(_FAMILIES.values())
_SUFFIXES = {
    "RMSNorm": "norm",
    "MLP": "mlp",
    "RotaryEmbedding": "rope",
    "Attention": "attention",
    "DecoderLayer": "structure",
}
# The table of these doesn't depend on the length of the text.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class Role:
    """What a module is in its model: ``kind`` is "output" or one of the table of suffixes."""

    kind: str
    family: str


def role_of(module: nn.Module) -> Role | None:
    """Return the module's role, or None for an unknown type."""
    cls = type(module)
    for family, prefix in _FAMILIES.items():
        if cls.__module__ != f"transformers.models.{family}.modeling_{family}":
            continue
        for suffix, kind in _SUFFIXES.items():
            if cls.__qualname__ == prefix + suffix:
                return Role(kind, family)
    return None


def plain_linear(module: nn.Module) -> bool:
    """Whether the module is exactly a `torch.nn.Linear` over plain parameters."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def misfit(module: nn.Module, role: Role) -> str | None:
    """Say why a module of a known type can't be replaced, or None if it can."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if any(not only_records(hook) for hook in hooks.values()):
            return "it has forward hooks, which its replacement would not run"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    check = _CHECKS.get(role.kind)
    return check(module) if check else None


def only_records(hook: Callable[..., Any]) -> bool:
    """Whether transformers added this hook, to every layer, when outputs were asked for."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _mlp_misfit(module: Any) -> str | None:
    if type(module.act_fn).__name__ not in GATES:
        return f"no op computes its activation {type(module.act_fn).__name__}"
    return unfusable([(name, getattr(module, name)) for name in ("gate_proj", "up_proj")])


def _rope_misfit(module: Any) -> str | None:
    if module.rope_type not in _STATIC_ROPE:
        return f"rope type {module.rope_type!r} changes its frequencies with the length"
    if module.inv_freq.is_meta:
        return "its frequencies are on the meta device: load the weights first"
    return None


def _attention_misfit(module: Any) -> str | None:
    if not getattr(module.config, "is_causal", True):
        return "config.is_causal is False: its attention is bidirectional"
    return unfusable([(name, getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj")])


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "mlp": _mlp_misfit,
    "rope": _rope_misfit,
    "attention": _attention_misfit,
}


def window_left(attention: Any, family: str) -> int:
    """How many keys before its own a query sees; -1 for all."""
    window: int | None = None
    if family == "mistral":
        window = getattr(attention.config, "sliding_window", None)
    elif family == "qwen2":
        window = attention.sliding_window
    return -1 if window is None else window - 1
