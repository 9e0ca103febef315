"""A kernel that leaves PyTorch in another state is found, and the state is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of, surroundings
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.subject import subject_of
from torch_ops.testing.surroundings import SETTINGS
from torch_ops.testing.verify import verify

OP = "silu_and_mul"
SPEC = Spec.of(OP, {"half": 3}, {"x": Operand("float32")})
reference: Callable[[Tensor], Tensor] = catalogue()[OP].reference
CHANGES: dict[str, Callable[[], object]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch._C._set_grad_enabled(not torch.is_grad_enabled()),
    "the CPU's random state": lambda: torch.rand(1, device="cpu"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flushing of denormals": lambda: torch.set_flush_denormal(True),
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "SDPA's kernels": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


def examine(kernel: Callable[..., Any]) -> None:
    subject = subject_of(kernel)
    Examiner(subject, proof_of(OP), catalogue()[OP].contract)(SPEC, Tally())


def read() -> dict[str, Any]:
    return {name: setting.get() for name, setting in SETTINGS.items()}


def test_every_setting_is_tried() -> None:
    assert set(CHANGES) == set(SETTINGS)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
def test_what_a_kernel_changes_is_found_and_put_back(name: str, raises: bool) -> None:
    def kernel(x: Tensor) -> Tensor:
        out = reference(x)
        CHANGES[name]()
        if raises:
            raise RuntimeError("launch failed")
        return out

    before = read()
    found = "launch failed" if raises else rf"\[contract\] state of PyTorch: {name} changed"
    with pytest.raises(ViolationError, match=found):
        examine(kernel)
    assert read() == before


def test_what_is_put_back_by_the_kernel_itself_is_its_own() -> None:
    def kernel(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(0)
            torch.rand(3)
            return reference(x)

    examine(kernel)


def test_a_verification_goes_on_with_the_state_of_before() -> None:
    def kernel(x: Tensor) -> Tensor:
        out = reference(x)
        torch.set_default_dtype(torch.float64)
        return out

    (cell,) = verify(OP, kernel, dtypes=["float32"], profile="dev").cells
    assert cell.verdict == "failed"
    assert cell.reason == (
        "state of PyTorch: the default dtype changed from torch.float32 to torch.float64"
    )
    assert torch.get_default_dtype() == torch.float32


def test_an_output_that_requires_grad_is_found() -> None:
    with pytest.raises(ViolationError, match="out: requires grad, and none of the inputs"):
        examine(lambda x: reference(x).requires_grad_())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.requires_grad_(), r"\(6,\), \(1,\), 0, torch.float32, True\) now, was"),
        (lambda x: x.unsqueeze_(0), r"x: an input is \(\(1, 1, 6\)"),
        (lambda x: x.resize_(3), r"x: an input is \(\(3,\)"),
        (lambda x: x.untyped_storage().resize_(99), "x: an input lies in other memory now"),
        (lambda x: x.set_(x.clone()), "x: an input lies in other memory now"),
    ],
    ids=["requires_grad", "unsqueeze", "resize", "storage", "set"],
)
def test_an_input_that_is_another_tensor_afterwards_is_found(
    change: Callable[[Tensor], object], message: str
) -> None:
    def kernel(x: Tensor) -> Tensor:
        out = reference(x)
        change(x)
        return out

    with pytest.raises(ViolationError, match=message):
        examine(kernel)


def test_a_predicate_leaves_the_state_alone_too() -> None:
    def supports(x: Tensor) -> None:
        torch.set_default_dtype(torch.float64)

    def kernel(x: Tensor) -> Tensor:
        return reference(x)

    kernel.supports = supports  # type: ignore[attr-defined]
    with pytest.raises(ViolationError, match="the default dtype changed"):
        examine(kernel)
    assert torch.get_default_dtype() == torch.float32


def test_matmul_precision_is_read_however_it_was_set() -> None:
    setting = SETTINGS["float32 matmul precision"]
    before, one = setting.get(), surroundings._PRECISE[1]
    word = one.fp32_precision
    try:
        one.fp32_precision = "bf16"
        assert "bf16" in setting.get()
        examine(reference)
    finally:
        one.fp32_precision = word
        setting.put(before)
    assert setting.get() == before
