"""`bucket`: the class of calls that one measurement speaks for, as a line of text.

It follows from the catalogue's conventions for signatures and needs nothing of an op:

- Every tensor counts by its dtype. Of its sizes the last one is exact, of three and more the last
  two are; those before them, tokens and sequences, are rounded up to a power of two.
- ``x`` is ``[..., d]`` where it comes first: it and what has as many dimensions are taken as rows.
- ``*_indptr`` counts sequences, one less than it has elements.
- The first size of a ``*_cache`` is how much of it there is, not how much is read: left out.
- Of numbers, ints are exact, but ``max_*`` is rounded up; a float that is off at 0.0 by default
  counts by whether it is on, any other one not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_ops.declare import Declaration

__all__ = ["bucket", "rounded"]


def rounded(size: int) -> int:
    """Round up to a power of two; 0 stays."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def bucket(declaration: Declaration, args: Sequence[Any]) -> str:
    """Name the bucket of a call, such as ``x bfloat16[16, 4096], weight bfloat16[4096]``.

    Args:
        declaration: The op.
        args: Arguments by position; those left out at the end have their defaults.
    """
    parameters = list(declaration.signature.parameters.values())
    values = [*args, *(parameter.default for parameter in parameters[len(args) :])]
    first = values[0] if values and parameters[0].name == "x" else None
    rank = first.dim() if isinstance(first, Tensor) else -1
    parts = []
    for parameter, value in zip(parameters, values, strict=False):
        text = _tensor(parameter.name, value, rank) or _number(parameter, value)
        if text:
            parts.append(f"{parameter.name} {text}")
    return ", ".join(parts)


def _tensor(name: str, value: object, rank: int) -> str:
    if not isinstance(value, Tensor):
        return ""
    sizes = [int(size) for size in value.shape]
    if len(sizes) == rank > 0:
        rows = 1
        for size in sizes[:-1]:
            rows *= size
        shown = [str(rounded(rows)), str(sizes[-1])]
    elif name.endswith("_cache") and sizes:
        shown = ["*", *map(str, sizes[1:])]
    elif name.endswith("_indptr") and len(sizes) == 1:
        shown = [f"{rounded(sizes[0] - 1)} + 1"]
    else:
        exact = min(max(len(sizes) - 1, 0), 2)
        leading = len(sizes) - exact
        shown = [str(rounded(size)) for size in sizes[:leading]]
        shown += [str(size) for size in sizes[leading:]]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(shown)}]"


def _number(parameter: inspect.Parameter, value: object) -> str:
    if isinstance(value, float) or "float" in str(parameter.annotation):
        if parameter.default != 0.0 or isinstance(parameter.default, bool):
            return ""
        return "off" if not value else "on"
    if isinstance(value, int) and not isinstance(value, bool) and parameter.name.startswith("max_"):
        return str(rounded(value))
    return repr(value).removeprefix("torch.").strip("'")
