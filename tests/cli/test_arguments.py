"""Sample arguments from a command line, and what is said about those that can't be made."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops.cli.arguments import (
    Sample,
    UsageError,
    parse_device,
    parse_dtype,
    parse_shape,
    parse_value,
)


def rotate(
    q: Tensor, cache: Tensor, positions: Tensor | None, base: int, eps: float = 1e-6
) -> None:
    """Stand in for an op: two tensors, an optional one, a value without and one with a default."""


SIGNATURE = inspect.signature(rotate, eval_str=True)


def sample(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], **values: object) -> Sample:
    return Sample(shapes, dtypes, torch.device("cpu"), values)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("4x4096", (4, 4096)),
        ("4,4096", (4, 4096)),
        ("[4, 4096]", (4, 4096)),
        ("(2,)", (2,)),
        ("4096", (4096,)),
        ("0x8", (0, 8)),
        ("()", ()),
    ],
)
def test_parse_shape(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["4y8", "-1x8", "4x", "4xx8", "a", "1.5"])
def test_parse_shape_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shape '.*' is not a shape \(accepted: sizes joined"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["bfloat16", "torch.bfloat16"])
def test_parse_dtype(text: str) -> None:
    assert parse_dtype(text) is torch.bfloat16


@pytest.mark.parametrize("text", ["bf17", "nn", "Tensor", ""])
def test_parse_dtype_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"--dtype '.*' is not a dtype of torch .*bfloat16"):
        parse_dtype(text)


def test_parse_device() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"--device 'gpu' is not a device \(here: cpu"):
        parse_device("gpu")
    with pytest.raises(UsageError, match=r"--device 'cuda:99' is not on this machine \(here: cpu"):
        parse_device("cuda:99")
    with pytest.raises(UsageError, match=r"--device 'meta' is not on this machine"):
        parse_device("meta")


def test_parse_value() -> None:
    assert parse_value("eps=1e-5") == ("eps", 1e-5)
    assert parse_value("is_causal=True") == ("is_causal", True)
    assert parse_value("mode=fast") == ("mode", "fast")
    with pytest.raises(UsageError, match="--arg 'eps' is not of the form NAME=VALUE"):
        parse_value("eps")


@pytest.mark.parametrize("shape", [(10**15,), (2**31, 2**31), (10**18, 10**18, 3)])
def test_build_refuses_what_no_memory_holds(shape: tuple[int, ...]) -> None:
    message = r"--shape \d+(x\d+)* of 'q' takes .* GiB, which can't be had on cpu \(acc"
    with pytest.raises(UsageError, match=message):
        sample([shape], [torch.float32], base=7).build("rotate", SIGNATURE)


def test_a_size_past_all_memory_is_no_shape() -> None:
    with pytest.raises(UsageError, match="has a size past any memory"):
        parse_shape("4x" + 5000 * "9")


def test_build_one_dtype_for_all() -> None:
    built = sample([(2, 3), (5,), (2,)], [torch.float16], base=7).build("rotate", SIGNATURE)
    assert {name: tuple(t.shape) for name, t in built.items() if isinstance(t, Tensor)} == {
        "q": (2, 3),
        "cache": (5,),
        "positions": (2,),
    }
    assert {t.dtype for t in built.values() if isinstance(t, Tensor)} == {torch.float16}
    assert built["base"] == 7
    assert "eps" not in built


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": "x"}, r"--arg base=x is of the wrong type \(accepted: a whole number\)"),
        ({"base": 1.5}, r"--arg base=1.5 is of the wrong type"),
        ({"base": True}, r"--arg base=True is of the wrong type"),
        ({"base": 1, "eps": "x"}, r"--arg eps=x is of the wrong type \(accepted: a number\)"),
    ],
)
def test_build_refuses_values_of_other_types(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sample([(2,)] * 3, [torch.float32], **values).build("rotate", SIGNATURE)


def test_build_takes_words_for_numbers_and_dtypes() -> None:
    def op(x: Tensor, limit: float | None, out: torch.dtype, flag: bool) -> None: ...

    built = sample([(2,)], [torch.float32], limit="inf", out="float16", flag=False)
    values = built.build("op", inspect.signature(op))
    assert (values["limit"], values["out"], values["flag"]) == (math.inf, torch.float16, False)
    none = sample([(2,)], [torch.float32], limit=None, out="float16", flag=True)
    assert none.build("op", inspect.signature(op))["limit"] is None
    wrong = sample([(2,)], [torch.float32], limit=1, out="float16", flag="yes")
    with pytest.raises(UsageError, match=r"--arg flag=yes .* \(accepted: True or False\)"):
        wrong.build("op", inspect.signature(op))


def test_build_a_dtype_for_each() -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.int64]
    built = sample([(2,), (3,), (4,)], dtypes, base=1).build("rotate", SIGNATURE)
    assert [built[name].dtype for name in ("q", "cache", "positions")] == dtypes


@pytest.mark.parametrize(
    ("shapes", "dtypes", "values", "message"),
    [
        (
            [(2,)],
            [torch.float32],
            {},
            r"op 'rotate' also needs a --shape for each of cache, positions \(1 given, in this "
            r"order\) and --arg base=VALUE",
        ),
        (
            [(2,)] * 4,
            [torch.float32],
            {"base": 1},
            r"--shape is given 4 times, but op 'rotate' has 3 tensor arguments "
            r"\(q, cache, positions\)",
        ),
        (
            [(2,)] * 3,
            [torch.float32] * 2,
            {"base": 1},
            r"--dtype is given 2 times \(accepted: once, or once per --shape, which is 3 times\)",
        ),
        (
            [(2,)] * 3,
            [torch.float32],
            {"base": 1, "q": 3},
            r"--arg 'q' is no argument of op 'rotate' that takes a plain value "
            r"\(accepted: base, eps\)",
        ),
    ],
    ids=["too few", "too many", "dtypes", "value"],
)
def test_build_refuses(
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype],
    values: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        sample(shapes, dtypes, **values).build("rotate", SIGNATURE)
