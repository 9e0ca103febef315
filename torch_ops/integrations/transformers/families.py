"""What is known about model classes of transformers: which module is what, and when it fits.

Classes are known by their exact name, so nothing of transformers is imported and a subclass, which
may compute something else, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from torch_ops.integrations.acceleration import obstacle_on
from torch_ops.integrations.transformers.mlp import GATES
from torch_ops.integrations.transformers.projection import unfusable

__all__ = ["KNOWN", "Family", "Role", "misfit", "only_records", "plain_linear", "role_of"]


@dataclass(frozen=True)
class Family:
    """What tells the classes of one kind of model from those of others.

    Attributes:
        prefix: What names of its classes begin with.
        norm: The op of its norms.
        eps: Where a norm keeps its epsilon.
        gated: Projections of its feed-forward blocks, gate first, one or two.
        activation: Where such a block keeps its activation.
        projections: Projections of its attention, in the order of query, key and value.
        window: Where attention, or its config, keeps the sliding window; empty where it has none.
        soft_cap: Where attention keeps the cap of its logits; empty where it has none.
    """

    prefix: str
    norm: str = "rms_norm"
    eps: str = "variance_epsilon"
    gated: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    window: str = ""
    soft_cap: str = ""

    def window_left(self, attention: Any) -> int:
        """How many keys before its own a query sees; -1 for all."""
        window = _read(attention, self.window)
        return -1 if window is None else int(window) - 1

    def logits_soft_cap(self, attention: Any) -> float:
        """The cap of the logits, 0 for none."""
        return float(_read(attention, self.soft_cap) or 0.0)


_GEMMA = Family("Gemma3", norm="gemma_rms_norm", eps="eps", window="sliding_window")
_FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window="config.sliding_window"),
    "mixtral": Family("Mixtral", window="config.sliding_window"),
    "qwen2": Family("Qwen2", window="sliding_window"),
    "qwen3": Family("Qwen3", window="sliding_window"),
    "qwen2_moe": Family("Qwen2Moe", window="sliding_window"),
    "qwen3_moe": Family("Qwen3Moe", window="sliding_window"),
    "gemma2": replace(_GEMMA, prefix="Gemma2", soft_cap="attn_logit_softcapping"),
    "gemma3": _GEMMA,  # it keeps a cap in its config and doesn't use it
    "phi3": Family(
        "Phi3",
        gated=("gate_up_proj",),
        activation="activation_fn",
        projections=("qkv_proj",),
        window="config.sliding_window",
    ),
}
KNOWN = tuple(family.prefix for family in _FAMILIES.values())
_SUFFIXES = {
    "RMSNorm": "norm",
    "MLP": "mlp",
    "RotaryEmbedding": "rope",
    "Attention": "attention",
    "SparseMoeBlock": "experts",
    "DecoderLayer": "structure",
}
# The table of these doesn't depend on the length of the text.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class Role:
    """What a module is in its model: ``kind`` is "output" or one of the table of suffixes."""

    kind: str
    family: Family


def role_of(module: nn.Module) -> Role | None:
    """Return the module's role, or None for an unknown type."""
    cls = type(module)
    for name, family in _FAMILIES.items():
        if cls.__module__ != f"transformers.models.{name}.modeling_{name}":
            continue
        for suffix, kind in _SUFFIXES.items():
            if cls.__qualname__ == family.prefix + suffix:
                return Role(kind, family)
    return None


def plain_linear(module: nn.Module) -> bool:
    """Whether the module is exactly a `torch.nn.Linear` over plain parameters."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def misfit(module: nn.Module, role: Role) -> str | None:
    """Say why a module of a known type can't be replaced, or None if it can."""
    reason = obstacle_on(module, only_records)
    check = _CHECKS.get(role.kind)
    return check(module, role.family) if reason is None and check else reason


def only_records(hook: Callable[..., Any]) -> bool:
    """Whether transformers added this hook, to every layer, when outputs were asked for."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _mlp_misfit(module: Any, family: Family) -> str | None:
    activation = type(getattr(module, family.activation)).__name__
    if activation not in GATES:
        return f"no op computes its activation {activation}"
    return unfusable([(name, getattr(module, name)) for name in family.gated])


def _rope_misfit(module: Any, _family: Family) -> str | None:
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    for kind in kinds.values():
        if kind not in _STATIC_ROPE:
            return f"rope type {kind!r} changes its frequencies with the length"
    if any(buffer.is_meta for buffer in module.buffers()):
        return "its frequencies are on the meta device: load the weights first"
    return None


def _attention_misfit(module: Any, family: Family) -> str | None:
    if not getattr(module.config, "is_causal", True):
        return "config.is_causal is False: its attention is bidirectional"
    if not module.is_causal:
        return "config.use_bidirectional_attention is set: its attention is bidirectional"
    return unfusable([(name, getattr(module, name)) for name in family.projections])


def _experts_misfit(module: Any, family: Family) -> str | None:
    if type(module.experts).__qualname__ != f"{family.prefix}Experts":
        return f"its experts are of an unknown type {type(module.experts).__qualname__}"
    if type(module.gate).__qualname__ != f"{family.prefix}TopKRouter":
        return f"its router is of an unknown type {type(module.gate).__qualname__}"
    for name, part in (("experts", module.experts), ("gate", module.gate)):
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if "forward" in vars(part) or any(not only_records(hook) for hook in hooks):
            return f"its {name} has forward hooks or a forward of its own"
    activation = type(module.experts.act_fn).__name__
    if GATES.get(activation) != "silu_and_mul":
        return f"no op computes experts with the activation {activation}"
    return _layout_misfit(module.experts)


def _layout_misfit(experts: Any) -> str | None:
    """Say why weights aren't ``[E, 2F, H]`` and ``[E, H, F]``, gate first, without biases."""
    wide, down = experts.gate_up_proj, experts.down_proj
    shapes = f"{list(wide.shape)} and {list(down.shape)}"
    fits = wide.dim() == down.dim() == 3 and not dict(experts.named_children()).keys() - {"act_fn"}
    if not fits or wide.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return f"its experts' weights are {shapes} (accepted: [E, 2 F, H] and [E, H, F])"
    unlike = {"is_transposed": True, "is_concatenated": False, "has_bias": True, "has_gate": False}
    for name, value in unlike.items():
        if getattr(experts, name, None) is value:
            return f"its experts are laid out with {name}={value}"
    if (wide.dtype, wide.device) != (down.dtype, down.device):
        return "its experts' weights differ in dtype or device"
    return None


_CHECKS: dict[str, Callable[[Any, Family], str | None]] = {
    "mlp": _mlp_misfit,
    "rope": _rope_misfit,
    "attention": _attention_misfit,
    "experts": _experts_misfit,
}


def _read(attention: Any, where: str) -> Any:
    """Read an attribute of attention or, after ``config.``, of its config; None if it is absent."""
    name = where.removeprefix("config.")
    owner = attention.config if name != where else attention
    return getattr(owner, name, None) if name else None
