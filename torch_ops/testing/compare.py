"""Is a result right? First the class of every element (NaN, infinity, finite), then its error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import bits_equal, overflow_threshold, ulps
from torch_ops.testing.proof import Output, Pair

WORST = 8


class ViolationError(AssertionError):
    """A kernel broke a promise.

    Attributes:
        layer: Which promise: ``contract``, ``bound``, ``zero``, ``opcheck``, ``compiled`` or a
            law's name.
        detail: What was seen.
        spec: The Spec as JSON, once it is known.
    """

    def __init__(self, layer: str, detail: str, spec: str = "") -> None:
        super().__init__(f"[{layer}] {detail}" + (f"\n  spec: {spec}" if spec else ""))
        self.layer = layer
        self.detail = detail
        self.spec = spec


class DeviceLostError(BaseException):
    """The GPU's context is gone, as after an illegal access; nothing can run in this process.

    No `Exception`, so that nothing takes it for a failing example that could be shrunk.

    Attributes:
        detail: What was seen.
        spec: The Spec as JSON, once it is known.
    """

    def __init__(self, detail: str, spec: str = "") -> None:
        super().__init__(f"{detail}\n  spec: {spec}")
        self.detail = detail
        self.spec = spec


def check_output(actual: Tensor, expected: Output) -> float:
    """Compares one output with what it has to be.

    Returns:
        The largest error as a part of its bound; 0 for outputs that must be equal bit for bit.

    Raises:
        ViolationError: An element is of the wrong class or outside its bound.
    """
    actual = actual.cpu()
    if expected.bound is None:
        wrong = ~bits_equal(actual, expected.value.to(expected.dtype))
        if bool(wrong.any()):
            ratio = torch.where(wrong, torch.inf, 0.0)
            raise ViolationError(
                "bound", f"{expected.name} is not exact: {_worst(actual, expected, ratio)}"
            )
        return 0.0
    got, want, bound = actual.double(), expected.value, expected.bound
    got = torch.where(_undefined(expected), want, got)
    _check_classes(got, expected)
    finite = got.isfinite() & want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    ratio = torch.where(error > 0, error / bound, 0.0)
    if not ratio.numel():
        return 0.0
    worst = float(ratio.max())
    if not worst <= 1:
        places = _worst(actual, expected, ratio)
        detail = f"{expected.name}: error is {worst:.4g} of its bound: {places}"
        raise ViolationError("bound", detail)
    return worst


def check_outputs(actual: Sequence[Tensor], expected: Sequence[Output]) -> float:
    """Compares every output with what it has to be, given the others.

    Returns:
        The largest error as a part of its bound.

    Raises:
        ViolationError: An element is of the wrong class or outside its bound.
    """
    given = tuple(tensor.cpu() for tensor in actual)
    wanted = [want if want.given is None else want.given(given) for want in expected]
    return max(check_output(got, want) for got, want in zip(given, wanted, strict=True))


def _undefined(expected: Output) -> Tensor:
    """Which elements may be anything: their bound is infinite, and the value isn't."""
    assert expected.bound is not None
    return expected.value.isfinite() & expected.bound.isinf()


def _check_classes(got: Tensor, expected: Output) -> None:
    """Where the exact value surely rounds to a finite number, to an infinity, or is NaN."""
    want, bound = expected.value, expected.bound
    limit = overflow_threshold(expected.dtype)
    slack = torch.where(want.isfinite(), bound if bound is not None else 0.0, 0.0)
    must_be_finite = want.isfinite() & (want.abs() + slack < limit)
    must_be_infinite = want.isinf() | (want.abs() - slack >= limit)
    wrong = got.isnan() != want.isnan()
    wrong |= must_be_finite & ~got.isfinite()
    wrong |= must_be_infinite & ~(got.isinf() & (got.sign() == want.sign()))
    wrong |= got.isinf() & (got.sign() != want.sign())
    if bool(wrong.any()):
        places = _rows(wrong, got, want)
        raise ViolationError("bound", f"{expected.name}: wrong class of value: {places}")


def _rows(wrong: Tensor, got: Tensor, want: Tensor) -> str:
    found = wrong.nonzero()[:WORST].tolist()
    return "; ".join(
        f"{tuple(i)}: got {float(got[tuple(i)]):.9g}, oracle {float(want[tuple(i)]):.9g}"
        for i in found
    )


def _worst(actual: Tensor, expected: Output, ratio: Tensor) -> str:
    got, want = actual.double(), expected.value.double()
    bound = torch.zeros_like(want) if expected.bound is None else expected.bound
    ratio = ratio.reshape(-1)
    order = ratio.argsort(descending=True, stable=True)[:WORST].tolist()
    lines = []
    for flat in order:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
        if not float(ratio[flat]) > 0:
            break
        a, b = float(got[index]), float(want[index])
        lines.append(
            f"{index}: got {a:.9g}, oracle {b:.9g}, bound {float(bound[index]):.3g}, "
            f"ratio {float(ratio[flat]):.4g}, {ulps(a, b, actual.dtype):.3g} ulp"
        )
    return "; ".join(lines)


def check_pairs(law: str, pairs: Sequence[Pair]) -> None:
    """Checks what a law compares.

    Raises:
        ViolationError: A pair differs.
    """
    for pair in pairs:
        a, b = pair.actual.cpu(), pair.expected.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            detail = f"{pair.what}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
            raise ViolationError(law, detail)
        if pair.bound is None:
            wrong = ~bits_equal(a, b)
        else:
            wrong = ~(bits_equal(a, b) | ((a.double() - b.double()).abs() <= pair.bound.cpu()))
        if bool(wrong.any()):
            how = "differs bitwise" if pair.bound is None else "differs by more than its bound"
            count = int(wrong.sum())
            raise ViolationError(
                law, f"{pair.what} {how} in {count} elements: {_differences(wrong, a, b)}"
            )


def _differences(wrong: Tensor, a: Tensor, b: Tensor) -> str:
    found = wrong.nonzero()[:WORST].tolist()
    return "; ".join(
        f"{tuple(i)}: {a[tuple(i)].item():.9g} against {b[tuple(i)].item():.9g}" for i in found
    )
