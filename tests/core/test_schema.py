"""Schemas from typed functions: equal to PyTorch's own, with clear words for what has no place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
import torch
from torch import Tensor

from torch_ops import DeclarationError, schema
from torch_ops.declarations import catalogue


def infer(function: Callable[..., Any], mutates: tuple[str, ...] = ()) -> str:
    return schema.infer("f", schema.resolve_annotations(function, {}), mutates)


def one(x: Tensor, n: int, eps: float = 1e-6, flag: bool = True, name: str = "a") -> Tensor:
    raise NotImplementedError


def optional(
    x: Tensor,
    y: Tensor | None = None,
    z: Optional[Tensor] = None,  # noqa: UP045
    s: float | None = None,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def dtyped(x: Tensor, dtype: torch.dtype = torch.float16, m: int | None = 3) -> Tensor:
    raise NotImplementedError


def nothing(x: Tensor, y: Tensor) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "mutates"),
    [(one, ()), (optional, ()), (dtyped, ()), (nothing, ("x",)), (nothing, ("y", "x"))],
    ids=["scalars", "optional", "dtype", "one mutated", "two mutated"],
)
def test_equal_to_pytorch(function: Callable[..., Any], mutates: tuple[str, ...]) -> None:
    """Both texts parse to one schema."""
    function.__annotations__ = inspect.get_annotations(function, eval_str=True)
    expected = torch.library.infer_schema(function, mutates_args=mutates)
    parse = torch._C.parse_schema
    assert str(parse("f" + infer(function, mutates))) == str(parse("f" + expected))


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_op_has_the_schema_that_it_declares(name: str) -> None:
    declaration = catalogue()[name]
    packet = getattr(torch.ops.torch_ops, name)
    parse = torch._C.parse_schema
    full = f"torch_ops::{name}"
    assert str(packet.default._schema) == str(parse(full + declaration.schema))
    backend = f"{full}.backend{schema.backend_overload(declaration.schema)}"
    assert str(packet.backend._schema) == str(parse(backend))
    arguments = packet.backend._schema.arguments
    assert [a.name for a in arguments[:-1]] == [a.name for a in packet.default._schema.arguments]
    assert (arguments[-1].name, str(arguments[-1].type)) == ("backend", "str")
    assert not any(a.kwarg_only for a in arguments)
    assert torch.Tag.out not in packet.default.tags


def missing_annotation(x) -> Tensor:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def unresolvable(x: NowhereDefined) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    raise NotImplementedError


def listed(x: list[Tensor]) -> Tensor:
    raise NotImplementedError


def literal(x: Tensor, mode: Literal["a", "b"]) -> Tensor:
    raise NotImplementedError


def either(x: Tensor, n: int | float) -> Tensor:
    raise NotImplementedError


def optional_return(x: Tensor) -> Tensor | None:
    raise NotImplementedError


def float_return(x: Tensor) -> float:
    raise NotImplementedError


def keyword_only(x: Tensor, *, n: int) -> Tensor:
    raise NotImplementedError


def variadic(*x: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (missing_annotation, "op 'missing_annotation': argument 'x' has no annotation"),
        (unresolvable, r"annotation 'NowhereDefined' of argument 'x' can't be resolved .*import"),
        (listed, r"type list\[torch.Tensor\] of argument 'x' has no place in a schema"),
        (literal, r"of argument 'mode' has no place in a schema \(accepted: Tensor, int, float"),
        (either, r"type int \| float of argument 'n' has no place"),
        (optional_return, r"return type torch.Tensor \| None has no place .*accepted: Tensor, a"),
        (float_return, r"return type <class 'float'> has no place in a schema"),
        (keyword_only, "argument 'n' must be positional-or-keyword, received keyword-only"),
        (variadic, "argument 'x' must be positional-or-keyword, received variadic positional"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_place(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        infer(function)


@pytest.mark.parametrize(
    ("mutates", "message"),
    [
        (("z",), r"mutates names unknown arguments \['z'\]"),
        (("n",), "mutated argument 'n' must be a Tensor, received SymInt"),
    ],
)
def test_what_cannot_be_mutated(mutates: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        infer(one, mutates)
    with pytest.raises(
        DeclarationError, match=r"mutated argument 'y' must be a Tensor, .*Tensor\?"
    ):
        infer(optional, ("y",))


def test_annotations_resolve_in_the_scope_of_the_declaration() -> None:
    """A future annotation whose names exist in the enclosing function alone."""

    def scope() -> str:
        from torch import Tensor as Local

        def inner(x: Local) -> Local:
            raise NotImplementedError

        return schema.infer("f", schema.resolve_annotations(inner, locals()), ())

    assert scope() == "(Tensor x) -> Tensor"
