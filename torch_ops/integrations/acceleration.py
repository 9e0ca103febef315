"""Commit and undo, for every library's models: what is replaced by what, and what was left."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_ops.attention import Attention

__all__ = [
    "Acceleration",
    "Place",
    "Swap",
    "carry_out",
    "check_model",
    "obstacle_on",
    "places_of",
]

_log = logging.getLogger(__name__)
_FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
_HOOKS = (
    *_FORWARD_HOOKS,
    *_BACKWARD_HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class Place:
    """An attribute of a module: where a child, a config or a processor hangs."""

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
        if isinstance(self.replacement, nn.Module) and isinstance(self.original, nn.Module):
            self.replacement.training = self.original.training  # its parts keep their own
        self._put(self.replacement)

    def revert(self) -> None:
        """Put the original back, with the parameters that the model has now."""
        if isinstance(self.replacement, nn.Module) and isinstance(self.original, nn.Module):
            _hand_back(self.replacement, self.original)
        self._put(self.original)

    def moved(self) -> str | None:
        """Name a place that holds something else by now, not even the original, or None."""
        for place in self.places:
            held = getattr(place.owner, place.attribute, None)
            if held is not self.replacement and held is not self.original:
                return place.name
        return None

    def _put(self, value: object) -> None:
        for place in self.places:
            if not isinstance(value, nn.Module):  # a name of a child takes modules alone
                place.owner._modules.pop(place.attribute, None)
            setattr(place.owner, place.attribute, value)


def _hand_back(replacement: nn.Module, original: nn.Module) -> None:
    # Loading with assign=True or replacing a layer gives the replacement other objects.
    for table in ("_parameters", "_modules"):
        mine, theirs = getattr(replacement, table), getattr(original, table)
        theirs.update({name: mine[name] for name in theirs if name in mine})
    for table in _HOOKS:  # the same objects, so that who has put one there can take it away
        if getattr(replacement, table):
            setattr(original, table, getattr(replacement, table))
    original.training = replacement.training
    for name, child in original.named_children():
        if name not in replacement._modules:
            child.train(replacement.training)


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
    _undone: Callable[[nn.Module], None] | None = field(default=None, repr=False)

    def undo(self) -> None:
        """Put the original modules back, bit for bit as they were; a second call does nothing.

        Weights that were loaded, moved or converted meanwhile stay so, and so do hooks.

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
                self._swaps[-1].revert()  # where this raises, the next undo() goes on
                self._swaps.pop()
        if self._undone is not None:
            self._undone(self._model)

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


def check_model(model: object) -> None:
    """Raise TypeError unless a model is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate: argument 'model' is a {type(model).__name__} (accepted: a "
            "torch.nn.Module; of a pipeline its components, such as pipeline.transformer)"
        )


def places_of(model: nn.Module) -> tuple[dict[str, nn.Module], dict[int, list[Place]]]:
    """List each module once, by its first name, and by its id where all it hangs."""
    modules: dict[str, nn.Module] = {}
    places: dict[int, list[Place]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in places:
            modules[name] = module
        owner, _, attribute = name.rpartition(".")
        places[id(module)].append(Place(model.get_submodule(owner), attribute, name))
    return modules, places


def obstacle_on(
    module: nn.Module, harmless: Callable[[Callable[..., Any]], bool] | None = None
) -> str | None:
    """Say what was put on this very module that a replacement would lose, or None.

    Args:
        module: To be replaced.
        harmless: Whether a hook need not run.
    """
    hooks = [hook for table in _FORWARD_HOOKS for hook in getattr(module, table).values()]
    if any(harmless is None or not harmless(hook) for hook in hooks):
        return "it has forward hooks, which its replacement would not run"
    if any(getattr(module, table) for table in _BACKWARD_HOOKS):
        return "it has backward hooks, which its replacement would not run"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None


def carry_out(
    model: nn.Module,
    swaps: list[Swap],
    left: Iterable[tuple[str, str]],
    known: Iterable[str],
    undone: Callable[[nn.Module], None] | None = None,
) -> Acceleration:
    """Make all swaps, or none, and say what was done; warn if no attention is torch_ops' then.

    Args:
        model: What was planned for.
        swaps: In this order; undone in the opposite one.
        left: Names and reasons of modules that stay.
        known: What has attention that could have been replaced, for the warning.
        undone: Called with the model after an undo.
    """
    _commit(swaps)
    became = {place.name: swap.became for swap in swaps if swap.became for place in swap.places}
    done = Acceleration(tuple(became), tuple(left), model, became, swaps, undone)
    if not any(isinstance(module, Attention) for module in model.modules()):
        _log.warning(
            "accelerate: no attention of %s was replaced (known: %s): %d replaced, %d left; "
            "print what accelerate returns to see why",
            type(model).__name__, ", ".join(known), len(done.replaced), len(done.left),
        )  # fmt: skip
    return done


def _commit(swaps: list[Swap]) -> None:
    done: list[Swap] = []
    try:
        for swap in swaps:
            done.append(swap)
            swap.commit()
    except BaseException:
        for swap in reversed(done):
            swap.revert()
        raise
