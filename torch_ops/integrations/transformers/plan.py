"""Decide for every module of a model what it becomes, without changing anything."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from torch import nn

from torch_ops.attention import AttentionBackend
from torch_ops.integrations.transformers import families, masks
from torch_ops.integrations.transformers.acceleration import Place, Swap
from torch_ops.integrations.transformers.attention import SelfAttention
from torch_ops.integrations.transformers.head import OutputLinear
from torch_ops.integrations.transformers.mlp import GATES, GatedMLP
from torch_ops.integrations.transformers.norm import RMSNorm
from torch_ops.integrations.transformers.rope import RotaryTable, table

__all__ = ["Plan"]

_OURS = (RMSNorm, GatedMLP, RotaryTable, SelfAttention, OutputLinear)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Plan:
    """Swaps to make, and modules left alone with the reason. Building it changes nothing."""

    def __init__(self, model: nn.Module, attention: AttentionBackend | str | None) -> None:
        self.swaps: list[Swap] = []
        self.left: list[tuple[str, str]] = []
        self._model = model
        self._backend = attention
        self._modules: dict[str, nn.Module] = {}
        self._places: dict[int, list[Place]] = defaultdict(list)
        self._collect()
        self._blocked = self._blocked_attention()
        self._output = self._output_layer()
        settled: tuple[str, ...] = ()
        for name, module in self._modules.items():
            if name and not name.startswith(settled):
                settled += self._decide(name, module)
        self._plan_configs()

    def _collect(self) -> None:
        for name, module in self._model.named_modules(remove_duplicate=False):
            if id(module) not in self._places:
                self._modules[name] = module
            owner, _, attribute = name.rpartition(".")
            place = Place(self._model.get_submodule(owner), attribute, name)
            self._places[id(module)].append(place)

    def _blocked_attention(self) -> dict[int, str]:
        """Reason per rotary embedding and attention of decoders that can't change as a whole.

        Both exchange a table of positions instead of cosines and sines, so they change together.
        """
        blocked: dict[int, str] = {}
        for name, module in self._modules.items():
            role = families.role_of(module)
            if role is None or role.kind != "rope":
                continue
            decoder: Any = self._places[id(module)][0].owner
            users = self._attention_of(decoder)
            reason = self._obstacle([(name, module), *users])
            if reason is not None:
                blocked.update({id(part): reason for _, part in [(name, module), *users]})
        return blocked

    def _attention_of(self, decoder: Any) -> list[tuple[str, nn.Module]]:
        found = []
        for layer in decoder.layers:
            role = families.role_of(layer)
            part = layer.self_attn if role is not None and role.kind == "structure" else layer
            found.append((self._places[id(part)][0].name, part))
        return found

    @staticmethod
    def _obstacle(parts: list[tuple[str, nn.Module]]) -> str | None:
        for name, module in parts:
            role = families.role_of(module)
            if role is None or role.kind not in ("rope", "attention"):
                return f"its rotary embedding also serves {name}, of an unknown type"
            reason = families.misfit(module, role)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def _output_layer(self) -> nn.Module | None:
        getter = getattr(self._model, "get_output_embeddings", None)
        layer: nn.Module | None = getter() if getter is not None else None
        return layer

    def _decide(self, name: str, module: nn.Module) -> tuple[str, ...]:
        """Plan one module; returns prefixes of names that need no decision of their own."""
        if isinstance(module, _OURS):
            self.left.append((name, "already accelerated"))
            return (f"{name}.",)
        role = families.role_of(module)
        if module is self._output and families.plain_linear(module):
            role = families.Role("output", "")
        if role is None:
            if not isinstance(module, _CONTAINERS) and not hasattr(module, "base_model_prefix"):
                self.left.append((name, _unknown(module)))
            return ()
        if role.kind == "structure":
            return ()
        reason = self._blocked.get(id(module)) or families.misfit(module, role)
        if reason is not None:
            self.left.append((name, reason))
            return (f"{name}.",)
        replacement, became = self._build(module, role)
        self.swaps.append(Swap(module, replacement, self._places[id(module)], became))
        return tuple(f"{place.name}." for place in self._places[id(module)])

    def _build(self, module: Any, role: families.Role) -> tuple[nn.Module, str]:
        if role.kind == "norm":
            return RMSNorm(module.weight, module.variance_epsilon), "rms_norm"
        if role.kind == "mlp":
            op = GATES[type(module.act_fn).__name__]
            return GatedMLP(module, op), f"one product for gate and up, {op}"
        if role.kind == "rope":
            positions = module.config.max_position_embeddings
            cache = table(module.inv_freq, module.attention_scaling, positions)
            return RotaryTable(module, cache), "table of positions for apply_rope"
        if role.kind == "output":
            return OutputLinear(module), "linear, one CPU row as a reduction"
        attention = SelfAttention(
            module,
            num_heads=module.config.num_attention_heads,
            num_kv_heads=module.config.num_key_value_heads,
            window_left=families.window_left(module, role.family),
            backend=self._backend,
        )
        # Where and in which dtype the layer will run decides what serves it.
        attention.attn.to(module.q_proj.weight.device, module.q_proj.weight.dtype)
        return attention, f"one product for q, k, v, apply_rope, {attention.attn.backend.value}"

    def _plan_configs(self) -> None:
        """Give decoders whose attention changes a config that asks for no masks.

        A copy: other models may share the object.
        """
        copies: dict[int, Any] = {}
        for swap in list(self.swaps):
            if isinstance(swap.replacement, RotaryTable):
                config = swap.places[0].owner.config
                copies.setdefault(id(config), config)
        for config in copies.values():
            replacement = copy.copy(config)
            replacement._attn_implementation = masks.IMPLEMENTATION
            places = [
                Place(module, "config", f"{name}.config".lstrip("."))
                for name, module in self._modules.items()
                if hasattr(module, "base_model_prefix") and module.config is config
            ]
            self.swaps.append(Swap(config, replacement, places))


def _unknown(module: nn.Module) -> str:
    cls = type(module)
    if cls.__module__.startswith("torch.nn."):
        return f"{cls.__qualname__} isn't replaced (of torch.nn only Linear is)"
    return f"unknown type {cls.__module__}.{cls.__qualname__}"
