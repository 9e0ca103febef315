"""Plan, commit and undo: which modules of a model are replaced by which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from torch_ops.integrations.transformers.families import only_records
from torch_ops.integrations.transformers.projection import FusedLinears

__all__ = ["Acceleration", "Place", "Swap", "commit"]


@dataclass(frozen=True)
class Place:
    """An attribute of a module: where a child or a config hangs."""

    owner: nn.Module
    attribute: str
    name: str


@dataclass
class Swap:
    """One value replaced by another, in all its places."""

    original: object
    replacement: object
    places: list[Place]
    became: str = ""

    def commit(self) -> None:
        """Put the replacement in."""
        if isinstance(self.replacement, FusedLinears):
            self.replacement.fuse()
        self._put(self.replacement)

    def revert(self) -> None:
        """Put the original back, with the parameters that the model has now."""
        if isinstance(self.replacement, FusedLinears):
            self.replacement.unfuse()
        if isinstance(self.replacement, nn.Module) and isinstance(self.original, nn.Module):
            _hand_back(self.replacement, self.original)
        self._put(self.original)

    def moved(self) -> str | None:
        """Name a place that holds something else by now, or None."""
        for place in self.places:
            if getattr(place.owner, place.attribute) is not self.replacement:
                return place.name
        return None

    def _put(self, value: object) -> None:
        for place in self.places:
            setattr(place.owner, place.attribute, value)


def _hand_back(replacement: nn.Module, original: nn.Module) -> None:
    # Loading with assign=True or replacing a layer gives the replacement other objects.
    for table in ("_parameters", "_modules"):
        mine, theirs = getattr(replacement, table), getattr(original, table)
        theirs.update({name: mine[name] for name in theirs if name in mine})
    original.train(replacement.training)


@dataclass(eq=False)
class Acceleration:
    """What `accelerate` did to a model.

    Attributes:
        replaced: Qualified names of the modules that run on torch_ops now.
        left: Qualified name and reason of each module that was left as it was.
    """

    replaced: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    _model: nn.Module = field(repr=False)
    _became: dict[str, str] = field(default_factory=dict, repr=False)
    _swaps: list[Swap] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the original modules back, bit for bit as they were; a second call does nothing.

        Weights that were loaded, moved or converted meanwhile stay so.

        Raises:
            RuntimeError: A replaced module was itself replaced since; nothing was changed.
        """
        for swap in self._swaps:
            name = swap.moved()
            if name is not None:
                raise RuntimeError(
                    f"undo: {name} no longer holds what accelerate() put there; put it back "
                    "first. Nothing was changed"
                )
        if not self._swaps:
            return
        with torch.inference_mode(False), torch.no_grad():
            while self._swaps:
                self._swaps.pop().revert()
        _forget_recorders(self._model)

    def __str__(self) -> str:
        rows = [(name, self._became[name], "") for name in self.replaced]
        rows += [(name, "left", reason) for name, reason in self.left]
        lines = list(_table(_collapse(rows)))
        summary = f"{len(self.replaced)} modules replaced, {len(self.left)} left"
        if not self.replaced:
            summary += ": nothing was changed"
        elif not self._swaps:
            summary += "; undone since"
        return "\n".join([*lines, summary])


def _collapse(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Join rows that differ in layer numbers only."""
    counts = Counter((re.sub(r"\d+", "*", name), became, why) for name, became, why in rows)
    return [
        (f"{name} ({count})" if count > 1 else name, became, why)
        for (name, became, why), count in counts.items()
    ]


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    rows = [("module", "became", "why not"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, became, why in rows:
        yield f"{name:{widths[0]}}  {became:{widths[1]}}  {why}".rstrip()


def _forget_recorders(model: nn.Module) -> None:
    """Let transformers install its recording hooks anew, when outputs are asked for again.

    It installs them once a model, so attention that was not in place then would stay without.
    """
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if only_records(hook)]:
            del hooks[key]
        if "_output_capturing_hooks_installed" in vars(module):
            del module._output_capturing_hooks_installed


def commit(swaps: list[Swap]) -> None:
    """Make all swaps, or none."""
    done: list[Swap] = []
    try:
        for swap in swaps:
            done.append(swap)
            swap.commit()
    except BaseException:
        for swap in reversed(done):
            swap.revert()
        raise
