"""Sample arguments of an op from what a command line says about them. Runs no kernel."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Sample", "UsageError", "parse_device", "parse_dtype", "parse_function", "parse_shape"]

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DIGITS = 18  # of a size; PyTorch's sizes have 64 bits
_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
}


class UsageError(Exception):
    """The command line can't be understood; its text names the option and what is accepted."""


def parse_dtype(text: str) -> torch.dtype:
    """``"bfloat16"`` or ``"torch.bfloat16"`` to a dtype."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        known = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if _named(d)})
        raise UsageError(f"--dtype {text!r} is not a dtype of torch (accepted: {', '.join(known)})")
    return dtype


def _named(value: object) -> bool:
    return isinstance(value, torch.dtype)


def parse_function(text: str) -> Callable[[], object]:
    """``"FILE.py:function"`` to that function; runs the file as a module of its own.

    Raises:
        UsageError: there is no such file, no function in it, or one that takes arguments.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UsageError(f"--graph {text!r} names no file (accepted: FILE.py:FUNCTION)")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--graph {text!r}: {path!r} is no Python file (accepted: FILE.py)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not inspect.isfunction(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"--graph {text!r}: no function {name!r} (there: {', '.join(known)})")
    parameters = inspect.signature(found).parameters.values()
    wanted = [p.name for p in parameters if p.default is _EMPTY and p.kind not in _VARIADIC]
    if wanted:
        received = f"{name!r} takes {', '.join(wanted)}"
        raise UsageError(f"--graph {text!r}: {received} (accepted: one without arguments)")
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """``"4x4096"``, ``"4,4096"``, ``"[4, 4096]"`` or ``"()"`` (no dimension) to a shape."""
    inner = text.strip().strip("()[]").strip().removesuffix(",")
    if not inner:
        return ()
    sizes = re.split(r"\s*[x,]\s*|\s+", inner)
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(
            f"--shape {text!r} is not a shape (accepted: sizes joined by 'x' or ',', as in 4x4096)"
        )
    if any(len(size) > _DIGITS for size in sizes):
        raise UsageError(f"--shape {text!r} has a size past any memory (accepted: up to 10^18)")
    return tuple(int(size) for size in sizes)


def parse_device(text: str) -> torch.device:
    """``"cpu"`` or ``"cuda:1"`` to a device that this machine has."""
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"--device {text!r} is not a device (here: {', '.join(here)})") from None
    if device.type == "cuda" and device.index is None and len(here) > 1:
        return torch.device("cuda", torch.cuda.current_device())
    if str(device) not in here:
        raise UsageError(f"--device {text!r} is not on this machine (here: {', '.join(here)})")
    return device


def best_device() -> str:
    """Name the kind of this machine's GPU, else its CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Sample:
    """What a command line says about the arguments of one call.

    Attributes:
        shapes: One per tensor argument, in the order of the signature.
        dtypes: One for all tensor arguments, or one per tensor argument.
        device: Where the tensors are.
        values: ``name=value`` for arguments that are no tensors.
    """

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype]
    device: torch.device
    values: dict[str, Any] = field(default_factory=dict)

    def build(self, op: str, signature: inspect.Signature) -> dict[str, Any]:
        """Make the arguments; tensors are uninitialized, those without a shape keep their default.

        Raises:
            UsageError: shapes, dtypes or values don't fit the signature, or a tensor the memory.
        """
        tensors = [name for name, p in signature.parameters.items() if is_tensor(p)]
        self._check(op, signature, tensors)
        built = {n: _fitted(n, v, signature.parameters[n]) for n, v in self.values.items()}
        for number, (name, shape) in enumerate(zip(tensors, self.shapes, strict=False)):
            dtype = self.dtypes[number if len(self.dtypes) > 1 else 0]
            built[name] = self._empty(name, shape, dtype)
        missing = [
            name
            for name, p in signature.parameters.items()
            if p.default is _EMPTY and name not in built
        ]
        if missing:
            raise UsageError(_missing(op, signature, missing, len(self.shapes)))
        return built

    def _empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Predicates read strides and addresses, so a tensor without memory wouldn't do."""
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # too many bytes, or more than fit into 64 bits
            size = math.prod(shape) * dtype.itemsize
            raise UsageError(
                f"--shape {'x'.join(map(str, shape))} of {name!r} takes {size / 2**30:.3g} GiB, "
                f"which can't be had on {self.device} (accepted: shapes that fit into its memory): "
                f"{str(error).partition(chr(10))[0]}"
            ) from None

    def _check(self, op: str, signature: inspect.Signature, tensors: Sequence[str]) -> None:
        listed = ", ".join(tensors)
        if len(self.shapes) > len(tensors):
            raise UsageError(
                f"--shape is given {len(self.shapes)} times, "
                f"but op {op!r} has {len(tensors)} tensor arguments ({listed})"
            )
        if len(self.dtypes) not in (1, len(self.shapes)):
            raise UsageError(
                f"--dtype is given {len(self.dtypes)} times "
                f"(accepted: once, or once per --shape, which is {len(self.shapes)} times)"
            )
        others = [name for name in signature.parameters if name not in tensors]
        for name in self.values:
            if name not in others:
                raise UsageError(
                    f"--arg {name!r} is no argument of op {op!r} that takes a plain value "
                    f"(accepted: {', '.join(others) or 'none'})"
                )


def is_tensor(parameter: inspect.Parameter) -> bool:
    """Whether an argument of an op is a tensor, optional ones included."""
    return "Tensor" in str(parameter.annotation)


def _fitted(name: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Give a value as an argument of its type takes it; of other types, as it is."""
    annotation = str(parameter.annotation)
    found = re.search(r"\b(bool|int|float|dtype)\b", annotation)
    if found is None or (value is None and "None" in annotation):
        return value
    kind = found[1]
    if kind == "dtype":
        return parse_dtype(str(value))
    if kind == "float" and str(value) in ("nan", "inf", "-inf"):
        return float(value)
    types, accepted = _PLAIN[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise UsageError(f"--arg {name}={value} is of the wrong type (accepted: {accepted})")
    return value


def _missing(op: str, signature: inspect.Signature, missing: Sequence[str], given: int) -> str:
    tensors = [name for name in missing if is_tensor(signature.parameters[name])]
    values = [name for name in missing if name not in tensors]
    wanted = []
    if tensors:
        wanted.append(f"a --shape for each of {', '.join(tensors)} ({given} given, in this order)")
    if values:
        wanted.append("".join(f" --arg {name}=VALUE" for name in values).strip())
    return f"op {op!r} also needs {' and '.join(wanted)}"


def parse_value(text: str) -> tuple[str, Any]:
    """``"eps=1e-5"`` to ``("eps", 1e-05)``; what is no Python literal stays text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--arg {text!r} is not of the form NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
