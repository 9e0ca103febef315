"""Decide for every module of a model what it becomes, without changing anything."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_ops.attention import AttentionBackend
from torch_ops.integrations.acceleration import Place, Swap, obstacle_on, places_of
from torch_ops.integrations.diffusers import known
from torch_ops.integrations.diffusers.attention import Processor
from torch_ops.integrations.diffusers.norm import LayerNorm, RMSNorm
from torch_ops.integrations.diffusers.rope import RotaryTable

__all__ = ["Plan"]

_OURS = (LayerNorm, Processor, RMSNorm, RotaryTable)
_ALREADY = "already accelerated"


class Plan:
    """Swaps to make, and modules left alone with the reason. Building it changes nothing."""

    def __init__(self, model: nn.Module, attention: AttentionBackend | str | None) -> None:
        self._backend = attention
        self._modules, self._places = places_of(model)
        self._settled: set[int] = set()
        self._strangers: list[str] = []  # what may take an embedding of positions as it was
        self._verdicts: dict[str, Swap | str] = {}
        for name, module in self._modules.items():
            if id(module) not in self._settled:
                self._decide(name, module)
        for name, module in self._modules.items():
            if known.class_of(module) in known.ROPES and id(module) not in self._settled:
                self._verdicts[name] = self._decide_rope(name, module)
        self.swaps = [swap for swap in self._verdicts.values() if isinstance(swap, Swap)]
        self.left = [(name, why) for name, why in self._verdicts.items() if isinstance(why, str)]

    def _decide(self, name: str, module: nn.Module) -> None:
        if isinstance(module, _OURS):
            self._verdicts[name] = _ALREADY
            self._settle(module)
        elif known.attends(module):
            self._verdicts[_under(name, "processor")] = self._decide_attention(name, module)
        elif not name:
            return  # a model that isn't part of anything can't be replaced
        elif known.class_of(module) in known.ROPES:
            self._verdicts[name] = ""  # holds the place: decided when all others are
        elif (make := known.norm_maker(module)) is not None:
            reason = known.norm_misfit(module)
            self._verdicts[name] = reason or self._swap(module, make(module))
        elif (reason := known.unknown(module)) is not None:
            self._verdicts[name] = reason
            if next(module.children(), None) is not None:
                self._strangers.append(name)

    def _settle(self, module: nn.Module) -> None:
        self._settled.update(map(id, module.modules()))

    def _swap(self, module: nn.Module, made: nn.Module) -> Swap:
        became = {LayerNorm: "layer_norm", RotaryTable: "one table for apply_rope"}
        return Swap(module, made, self._places[id(module)], became.get(type(made), "rms_norm"))

    def _decide_attention(self, name: str, attention: Any) -> Swap | str:
        processor = attention.processor
        if isinstance(processor, nn.Module):
            self._settle(processor)
        if isinstance(processor, Processor):
            return _ALREADY
        block = self._modules[name.rpartition(".")[0]] if name else None
        form = known.form_of(attention)
        reason = known.attention_misfit(attention, form, block) or self._strange_rope(name, form)
        if form is None or reason is not None:
            self._strangers.append(name)
            return reason or ""
        made = form.replacement(attention, self._backend)
        rotates = form.ropes and made.attention.role != "cross"
        became = "apply_rope, " * bool(rotates) + made.attention.backend.value
        place = Place(attention, "processor", _under(name, "processor"))
        return Swap(processor, made, [place], became)

    def _strange_rope(self, name: str, form: known.Form | None) -> str | None:
        """Say if attention gets an embedding of positions that nobody knows."""
        while form is not None and form.ropes and name:
            name = name.rpartition(".")[0]
            rope = getattr(self._modules[name], form.rope_at, None)
            if rope is not None and not isinstance(rope, RotaryTable):
                known_one = known.class_of(rope) in form.ropes
                where = _under(name, form.rope_at)
                return None if known_one else f"{where} is of unknown type {known.class_of(rope)}"
        return None

    def _decide_rope(self, name: str, rope: nn.Module) -> Swap | str:
        owner = name[: name.rindex(".") + 1] if "." in name else ""
        for stranger in self._strangers:
            if stranger.startswith(owner):
                return f"{stranger} may take it as it is; other attention makes tables of it"
        return obstacle_on(rope) or self._swap(rope, RotaryTable(rope))


def _under(name: str, attribute: str) -> str:
    return f"{name}.{attribute}".lstrip(".")
