"""Comparison: class of value first, then error against bound; contract checks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from torch_ops.testing.arithmetic import bits_equal, overflow_threshold, rounding, ulps
from torch_ops.testing.compare import ViolationError, check_output, check_pairs
from torch_ops.testing.contract import Snapshot, check_fresh, check_metadata
from torch_ops.testing.proof import Output, Pair

FP16 = torch.float16


def _output(value: list[float], bound: list[float] | None, dtype: torch.dtype = FP16) -> Output:
    exact = torch.tensor(value, dtype=torch.float64)
    limit = None if bound is None else torch.tensor(bound, dtype=torch.float64)
    return Output("out", exact, limit, dtype)


def test_ratio_is_the_largest_error_by_its_bound() -> None:
    actual = torch.tensor([1.0, 2.0, 3.0])
    expected = _output([1.0, 2.5, 3.0], [0.1, 1.0, 0.1], torch.float32)
    assert check_output(actual, expected) == 0.5


def test_an_error_past_its_bound_is_reported_with_its_place() -> None:
    actual = torch.tensor([1.0, 2.0, 3.0])
    expected = _output([1.0, 2.5, 3.0], [0.1, 0.25, 0.1], torch.float32)
    with pytest.raises(ViolationError, match=r"error is 2 of its bound: \(1,\): got 2, oracle 2.5"):
        check_output(actual, expected)


def test_the_worst_elements_are_named_beside_nan_and_infinity() -> None:
    got = torch.tensor([math.nan, math.inf, 1.0, 3.0])
    within = _output([math.nan, math.inf, 1.0, 2.0], [math.nan, 1.0, 0.1, 0.5], torch.float32)
    with pytest.raises(ViolationError, match=r"error is 2 of its bound: \(3,\): got 3, [^;]*$"):
        check_output(got, within)
    exact = _output([math.nan, math.inf, 1.0, 2.0], None, torch.float32)
    with pytest.raises(ViolationError, match=r"out is not exact: \(3,\): got 3, [^;]*$"):
        check_output(got, exact)


def test_a_bound_of_zero_allows_no_error() -> None:
    expected = _output([1.0], [0.0], torch.float32)
    assert check_output(torch.tensor([1.0]), expected) == 0.0
    with pytest.raises(ViolationError, match="error is inf of its bound"):
        check_output(torch.tensor([1.0 + 2**-20]), expected)


@pytest.mark.parametrize(
    ("got", "oracle"),
    [
        (1.0, math.nan), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf),
        (math.inf, -math.inf), (math.nan, math.inf), (math.inf, 65519.0), (65504.0, 65530.0),
        (-math.inf, 65519.9),
    ],
)  # fmt: skip
def test_a_wrong_class_is_wrong_whatever_the_bound(got: float, oracle: float) -> None:
    expected = _output([0.0, oracle], [1.0, 0.01])
    with pytest.raises(ViolationError, match="wrong class of value"):
        check_output(torch.tensor([0.0, got], dtype=FP16), expected)


@pytest.mark.parametrize(
    ("got", "oracle"),
    [(math.nan, math.nan), (math.inf, math.inf), (math.inf, 65521.0), (65504.0, 65519.0),
     (math.inf, 65519.995), (-math.inf, -1e9)],
)  # fmt: skip
def test_a_right_class_passes(got: float, oracle: float) -> None:
    expected = _output([oracle], [20.0])
    assert check_output(torch.tensor([got], dtype=FP16), expected) <= 1


def test_the_threshold_of_overflow_is_where_rounding_overflows() -> None:
    float32, float64 = torch.float32, torch.float64
    for dtype, wide, limit in ((FP16, float32, 65520.0), (float32, float64, 2.0**128 - 2.0**103)):
        assert overflow_threshold(dtype) == limit
        below = torch.nextafter(torch.tensor(limit, dtype=wide), torch.tensor(0.0, dtype=wide))
        assert bool(below.to(dtype).isfinite())
        assert bool(torch.tensor(limit, dtype=torch.float64).to(dtype).isinf())
    assert overflow_threshold(torch.bfloat16) == 2.0**128 - 2.0**119


def test_rounding_units_are_half_an_ulp() -> None:
    for dtype in (FP16, torch.bfloat16, torch.float32):
        unit = rounding(dtype)
        one = torch.tensor(1.0, dtype=dtype)
        step = torch.nextafter(one.float(), torch.tensor(2.0)) if dtype == torch.float32 else None
        ulp = float(step - 1) if step is not None else torch.finfo(dtype).eps
        assert unit.u == ulp / 2
        assert unit.acc == 2.0**-24
        smallest = torch.tensor(2 * unit.eta, dtype=torch.float64).to(dtype)
        assert float(smallest) == 2 * unit.eta
        assert float(torch.tensor(unit.eta * 0.99, dtype=torch.float64).to(dtype)) == 0.0
    assert rounding(torch.float64).u == 2.0**-52


def test_exact_outputs_are_compared_by_bits() -> None:
    assert check_output(torch.tensor([1.0, -0.0]), _output([1.0, 0.0], None, torch.float32)) == 0
    with pytest.raises(ViolationError, match="out is not exact"):
        check_output(torch.tensor([1.0 + 2**-23]), _output([1.0], None, torch.float32))


def test_bits_equal_sees_every_difference_but_zero_signs_and_nan_payloads() -> None:
    a = torch.tensor([0.0, math.nan, 1.0, math.inf, math.nan])
    b = torch.tensor([-0.0, math.nan, 1.0 + 2**-23, math.inf, 1.0])
    assert bits_equal(a, b).tolist() == [True, True, False, True, False]


def test_ulps_count_in_the_binade_of_the_oracle() -> None:
    assert ulps(1.0 + 2**-9, 1.0, FP16) == 2.0
    assert ulps(4.0 + 2**-7, 4.0, FP16) == 2.0
    assert math.isnan(ulps(math.inf, 1.0, FP16))


def test_pairs_are_equal_or_within_their_bound() -> None:
    one, near = torch.tensor([1.0]), torch.tensor([1.125])
    check_pairs("law", [Pair("it", one, one.clone())])
    check_pairs("law", [Pair("it", one, near, torch.tensor([0.125]))])
    with pytest.raises(ViolationError, match=r"\[law\] it differs bitwise in 1 elements"):
        check_pairs("law", [Pair("it", one, near)])
    with pytest.raises(ViolationError, match="differs by more than its bound"):
        check_pairs("law", [Pair("it", one, near, torch.tensor([0.1]))])
    with pytest.raises(ViolationError, match=r"float32 .* against torch.float64"):
        check_pairs("law", [Pair("it", one, one.double())])


def _args() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 6), "y": torch.ones(4, 9)[:, 2:8]}


def test_snapshot_sees_inputs_and_gaps() -> None:
    args = _args()
    before = Snapshot.take(args)
    before.check(args, ())
    args["x"][1, 1] = 2
    with pytest.raises(ViolationError, match=r"x: an input changed \(\d bytes\)"):
        before.check(args, ())
    before.check(args, ("x",))
    args["y"][0, 0] = 5
    before.check(args, ("x", "y"))
    torch.empty(0).set_(args["y"].untyped_storage())[0] = 3
    with pytest.raises(ViolationError, match="y: bytes outside its elements changed"):
        before.check(args, ("x", "y"))
    with pytest.raises(ViolationError, match=r"y: an input changed \(4 bytes, 2 of them outside"):
        before.check(args, ("x",))


def test_outputs_are_fresh_and_contiguous() -> None:
    args = _args()
    fresh = torch.ones(4, 6)
    check_fresh((fresh, torch.ones(4, 6)), args, ())
    with pytest.raises(ViolationError, match="output 0 shares memory with input x"):
        check_fresh((args["x"][1:],), args, ())
    with pytest.raises(ViolationError, match="output 1 shares memory with output 0"):
        check_fresh((fresh, fresh.view(6, 4)), args, ())
    with pytest.raises(ViolationError, match="shares memory with an output of an earlier call"):
        check_fresh((fresh,), args, (fresh,))
    with pytest.raises(ViolationError, match=r"not contiguous: shape \(6, 4\), strides \(1, 6\)"):
        check_fresh((torch.ones(4, 6).t(),), args, ())
    check_fresh((torch.ones(0, 6), torch.ones(0, 6)), args, ())


def test_metadata_is_that_of_the_oracle() -> None:
    expected = (_output([1.0], [0.1], torch.float32),)
    check_metadata((torch.ones(1),), expected, _args())
    for wrong in (torch.ones(2), torch.ones(1).double(), torch.ones(1, device="meta")):
        with pytest.raises(ViolationError, match=r"out: received .* expected"):
            check_metadata((wrong,), expected, _args())
    with torch.inference_mode():
        made = torch.ones(1)
    for odd, text in (
        (nn.Parameter(torch.ones(1), requires_grad=False), "received a Parameter, expected"),
        (made, "made in inference mode"),
        (torch._neg_view(torch.ones(1)), "its memory holds other values"),
    ):
        with pytest.raises(ViolationError, match=f"out: {text}"):
            check_metadata((odd,), expected, _args())
    with pytest.raises(ViolationError, match="2 outputs, expected 1"):
        check_metadata((torch.ones(1), torch.ones(1)), expected, _args())
