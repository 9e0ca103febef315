"""Which attention layers a model has, under which names, and what they run."""

from __future__ import annotations

import fnmatch
import hashlib
import operator
import weakref
from collections.abc import Callable, Mapping

from torch import nn

from torch_ops.attention.group import default_group
from torch_ops.attention.layer import Attention
from torch_ops.errors import TorchOpsError

__all__ = ["attention_state", "select"]


def select(
    model: nn.Module, where: str | Callable[[str, Attention], bool] | None
) -> Mapping[str, Attention]:
    """Find each layer once, under the first of its names that is selected."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attention override: argument 'model' is a {type(model).__name__} "
            "(accepted: torch.nn.Module)"
        )
    if where is not None and not isinstance(where, str) and not callable(where):
        raise TypeError(
            f"attention override: argument 'where' is a {type(where).__name__} "
            "(accepted: None, a glob over qualified names, or a predicate of name and layer)"
        )
    names = _names(model)
    if where is None:
        return names.first
    selected: dict[Attention, str] = {}
    for name, layer in names.layers:
        if layer not in selected and _wanted(name, layer, where):
            selected[layer] = name
    return {name: layer for layer, name in selected.items()}


def _wanted(name: str, layer: Attention, where: str | Callable[[str, Attention], bool]) -> bool:
    return fnmatch.fnmatchcase(name, where) if isinstance(where, str) else where(name, layer)


class _Names:
    """Names of a model's layers, for as long as its modules have the same parts.

    Attributes:
        layers: Every layer under all of its names.
        first: Each layer once, by the first of its names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = _named(model)
        names = {layer: name for name, layer in reversed(self.layers)}
        self.first = {name: layer for name, layer in self.layers if names[layer] == name}
        self._parts = [module._modules for module in model.modules()]
        self._then = [parts.copy() for parts in self._parts]

    def hold(self) -> bool:
        """Whether no module has gained, lost or changed a part."""
        return all(map(operator.eq, self._parts, self._then))


# The group of a model's layers keeps its names, which keep modules: they are gone with the model.
_known: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Names]] = weakref.WeakKeyDictionary()


def _names(model: nn.Module) -> _Names:
    """Give the names of a model's layers, those from before where they hold: a swap is fast."""
    known = _known.get(model)
    names = None if known is None else known()
    if names is not None and names.hold():
        return names
    names = _Names(model)
    groups = {layer._group for _, layer in names.layers}
    if len(groups) == 1 and groups != {default_group}:
        groups.pop().names = names
        _known[model] = weakref.ref(names)
    return names


def _named(model: nn.Module) -> list[tuple[str, Attention]]:
    """Give every layer under all of its names, those of the modules that torch.compile wraps."""
    found: list[tuple[str, Attention]] = []

    def walk(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> None:
        if isinstance(module, Attention):
            found.append((name, module))
        for part, child in module._modules.items():
            if child is None or not (child._modules or isinstance(child, Attention)):
                continue  # most modules are such leaves
            inner = name if part == "_orig_mod" else f"{name}.{part}" if name else part
            if not child._modules:
                found.append((inner, child))  # type: ignore[arg-type]
            elif child not in above:
                walk(child, inner, (*above, module))

    walk(model, "", ())
    return found


def attention_state(model: nn.Module) -> str:
    """Digest of what every attention layer of a model would run; equal states are equal."""
    digest = hashlib.sha256()
    for name, layer in select(model, None).items():
        try:
            runs = " ".join(layer._chosen(decodes).value for decodes in (False, True))
        except TorchOpsError as error:
            runs = type(error).__name__
        digest.update(f"{name}|{runs}|{layer._override}\n".encode())
    return digest.hexdigest()[:16]
