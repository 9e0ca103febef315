"""Which attention layers a model has, under which names, and what they run."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable

from torch import nn

from torch_ops.attention.layer import Attention
from torch_ops.errors import TorchOpsError

__all__ = ["attention_state", "select"]


def select(
    model: nn.Module, where: str | Callable[[str, Attention], bool] | None
) -> dict[str, Attention]:
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
    selected: dict[Attention, str] = {}
    for name, layer in _named(model):
        if layer not in selected and _wanted(name, layer, where):
            selected[layer] = name
    return {name: layer for layer, name in selected.items()}


def _wanted(
    name: str, layer: Attention, where: str | Callable[[str, Attention], bool] | None
) -> bool:
    if where is None:
        return True
    return fnmatch.fnmatchcase(name, where) if isinstance(where, str) else where(name, layer)


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
