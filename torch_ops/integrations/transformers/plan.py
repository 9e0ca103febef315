"""Decide for every module of a model what it becomes, without changing anything."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from torch_ops.attention import AttentionBackend
from torch_ops.integrations.acceleration import Place, Swap, places_of
from torch_ops.integrations.transformers import families
from torch_ops.integrations.transformers.acceleration import FusingSwap
from torch_ops.integrations.transformers.attention import SelfAttention
from torch_ops.integrations.transformers.experts import SparseExperts
from torch_ops.integrations.transformers.head import OutputLinear
from torch_ops.integrations.transformers.interface import IMPLEMENTATION
from torch_ops.integrations.transformers.mlp import GATES, GatedMLP
from torch_ops.integrations.transformers.norm import RMSNorm
from torch_ops.integrations.transformers.rope import RotaryTable

__all__ = ["Plan"]

_OURS = (RMSNorm, GatedMLP, RotaryTable, SelfAttention, SparseExperts, OutputLinear)
_NESTED = ("norm", "mlp")  # what is decided by itself inside of what is replaced
_ALONE = "its rotary embedding isn't in what was given: give the whole decoder"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Plan:
    """Swaps to make, and modules left alone with the reason. Building it changes nothing."""

    def __init__(self, model: nn.Module, attention: AttentionBackend | str | None) -> None:
        self.swaps: list[Swap] = []
        self.left: list[tuple[str, str]] = []
        self._model = model
        self._backend = attention
        self._modules, self._places = places_of(model)
        self._holders = Counter(
            id(parameter)
            for module in self._modules.values()
            for parameter in module.parameters(recurse=False)
        )
        self._layers: dict[int, int] = {}  # of attention: how many layers its decoder has
        self._blocked = self._blocked_attention()
        self._output = self._output_layer()
        self._settled: set[int] = set()
        for name, module in self._modules.items():
            if name and id(module) not in self._settled:
                self._decide(name, module)
            elif not name and (isinstance(module, _OURS) or families.role_of(module) is not None):
                self.left.append(("", "it is what was given: give what holds it"))
        self._plan_configs()

    def _blocked_attention(self) -> dict[int, str]:
        """Reason per rotary embedding and attention of decoders that can't change as a whole.

        Both exchange a table of positions instead of cosines and sines, so they change together.
        """
        blocked: dict[int, str] = {}
        alone = {id(m): _ALONE for m in self._modules.values() if _is(m, "attention")}
        for name, module in self._modules.items():
            ours = isinstance(module, RotaryTable)
            if not name or not (ours or _is(module, "rope")):
                continue
            users = self._attention_of(self._places[id(module)][0].owner)
            for _, part in users:
                alone.pop(id(part), None)
                self._layers[id(part)] = len(users)
            reason = None if ours else self._obstacle([(name, module), *users])
            if reason is not None:
                blocked.update({id(part): reason for _, part in [(name, module), *users]})
        return alone | blocked

    def _attention_of(self, decoder: Any) -> list[tuple[str, nn.Module]]:
        found = []
        for layer in decoder.layers:
            role = families.role_of(layer)
            part = layer.self_attn if role is not None and role.kind == "structure" else layer
            found.append((self._places[id(part)][0].name, part))
        return found

    def _misfit(self, module: nn.Module, role: families.Role) -> str | None:
        """Say why a module can't be replaced, or None."""
        reason = families.misfit(module, role)
        fused = {"mlp": role.family.gated, "attention": role.family.projections}.get(role.kind, ())
        if reason is not None or len(fused) < 2:
            return reason
        for name in fused:
            for parameter in getattr(module, name).parameters():
                if self._holders[id(parameter)] > 1:
                    return f"{name} shares its parameter with another layer"
        return None

    def _obstacle(self, parts: list[tuple[str, nn.Module]]) -> str | None:
        for name, module in parts:
            role = families.role_of(module)
            if role is None or role.kind not in ("rope", "attention"):
                return f"its rotary embedding also serves {name}, of an unknown type"
            reason = self._misfit(module, role)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def _output_layer(self) -> nn.Module | None:
        getter = getattr(self._model, "get_output_embeddings", None)
        layer: nn.Module | None = getter() if getter is not None else None
        return layer

    def _decide(self, name: str, module: nn.Module) -> None:
        """Plan one module, and settle its parts that need no decision of their own."""
        if isinstance(module, _OURS):
            self.left.append((name, "already accelerated"))
            self._settle(module, lambda child: isinstance(child, _OURS))
            return
        role = families.role_of(module)
        if module is self._output and families.plain_linear(module):
            role = families.Role("output", families.Family(""))
        if role is None:
            if not isinstance(module, _CONTAINERS) and not hasattr(module, "base_model_prefix"):
                self.left.append((name, _unknown(module)))
            return
        if role.kind == "structure":
            return
        reason = self._blocked.get(id(module)) or self._misfit(module, role)
        if reason is not None:
            self.left.append((name, reason))
        else:
            replacement, became = self._build(module, role)
            self.swaps.append(FusingSwap(module, replacement, self._places[id(module)], became))
            self._adopt(module, replacement)
        self._settle(module, _nested)

    def _settle(self, module: nn.Module, apart: Callable[[nn.Module], bool]) -> None:
        """Leave out what is inside of a module, but for children that are decided apart."""
        for child in module.children():
            if not apart(child):
                self._settled.update(map(id, child.modules()))

    def _adopt(self, module: nn.Module, replacement: nn.Module) -> None:
        """Let children that are decided apart hang in the replacement from now on."""
        for child in filter(_nested, module.children()):
            self._places[id(child)] = [
                replace(place, owner=replacement) if place.owner is module else place
                for place in self._places[id(child)]
            ]

    def _build(self, module: Any, role: families.Role) -> tuple[nn.Module, str]:
        family = role.family
        if role.kind == "norm":
            return RMSNorm(module.weight, getattr(module, family.eps), family.norm), family.norm
        if role.kind == "mlp":
            op = GATES[type(getattr(module, family.activation)).__name__]
            return GatedMLP(module, family.gated, op), f"one product for gate and up, {op}"
        if role.kind == "rope":
            return RotaryTable(module), "table of positions for apply_rope"
        if role.kind == "experts":
            return SparseExperts(module), "topk_softmax, fused_experts"
        if role.kind == "output":
            return OutputLinear(module), "linear, one CPU row as a reduction"
        attention = SelfAttention(module, family, self._layers[id(module)], self._backend)
        # Where and in which dtype the layer will run decides what serves it.
        weight = getattr(module, family.projections[0]).weight
        attention.attn.to(weight.device, weight.dtype)
        return attention, f"one product for q, k, v, apply_rope, {attention.attn.backend.value}"

    def _plan_configs(self) -> None:
        """Give decoders whose attention changes a config that asks for masks of torch_ops.

        A copy: other models may share the object.
        """
        copies: dict[int, Any] = {}
        for swap in list(self.swaps):
            if isinstance(swap.replacement, RotaryTable):
                config = swap.places[0].owner.config
                copies.setdefault(id(config), config)
        for config in copies.values():
            replacement = copy.copy(config)
            replacement._attn_implementation = IMPLEMENTATION
            self._swap_config(config, replacement)
            self._plan_outer_configs(config, replacement)

    def _plan_outer_configs(self, config: Any, replacement: Any) -> None:
        """Do likewise for models of text and images: some make the masks of their decoder."""
        outer: dict[int, Any] = {
            id(module.config): module.config
            for module in self._modules.values()
            if hasattr(module, "base_model_prefix") and hasattr(module.config, "sub_configs")
        }
        for whole in outer.values():
            keys = [key for key in whole.sub_configs if getattr(whole, key, None) is config]
            if keys:
                other: Any = copy.copy(whole)
                for key in keys:
                    setattr(other, key, replacement)
                other._attn_implementation = {"": IMPLEMENTATION}  # of no part beside
                self._swap_config(whole, other)

    def _swap_config(self, config: Any, replacement: Any) -> None:
        places = [
            Place(module, "config", f"{name}.config".lstrip("."))
            for name, module in self._modules.items()
            if hasattr(module, "base_model_prefix") and module.config is config
        ]
        self.swaps.append(Swap(config, replacement, places))


def _is(module: nn.Module, kind: str) -> bool:
    role = families.role_of(module)
    return role is not None and role.kind == kind


def _nested(child: nn.Module) -> bool:
    role = families.role_of(child)
    return role is not None and role.kind in _NESTED


def _unknown(module: nn.Module) -> str:
    cls = type(module)
    if cls.__module__.startswith("torch.nn."):
        return f"{cls.__qualname__} isn't replaced (of torch.nn only the output Linear is)"
    return f"unknown type {cls.__module__}.{cls.__qualname__}"
