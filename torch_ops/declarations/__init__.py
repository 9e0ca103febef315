"""One module per op, named as the op; found by name. `catalogue` lists them."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_ops.declare import Declaration

__all__ = ["catalogue"]

_imported = False


def catalogue() -> Mapping[str, Declaration]:
    """Give every declared op by name, in order of name; also those declared elsewhere."""
    global _imported
    from torch_ops.declare import declared

    if not _imported:
        # What is declared stays. Looking for garbage among all of PyTorch's objects meanwhile takes
        # as long as declaring does.
        collects = gc.isenabled()
        gc.disable()
        try:
            for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
                if not module.endswith("__") and not module.startswith("_"):
                    importlib.import_module(f"{__name__}.{module}")
        finally:
            if collects:
                gc.enable()
        _imported = True
    return MappingProxyType(dict(sorted(declared.items())))
