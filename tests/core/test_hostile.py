"""What other threads, forks and unusual orders do to choices; arguments that only look legal."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import torch_ops
from torch_ops import TorchOpsError, dynamo, ops
from torch_ops.testing.verify import verify


def test_another_thread_that_compiles_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag is one of the process; a compile in another thread sets it for all."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    assert not dynamo.traced_otherwise()
    with torch_ops.use_backend("torch"):
        ops.rms_norm(torch.ones(2, 4))
    torch_ops.set_backend("torch")()
    torch_ops.warmup("rms_norm", torch.ones(2, 4))


def test_traced_code_is_known_by_its_thread() -> None:
    seen = []

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(dynamo.traced_otherwise())
            return x + 1

    torch.export.export(Model(), (torch.zeros(2),), strict=False)
    assert True in seen


def _ran() -> tuple[str, str]:
    with torch_ops.trace() as seen:
        ops.silu_and_mul(torch.ones(2, 4))
    return seen.records[0].backend.value, seen.records[0].source


def test_a_scope_that_is_left_first_takes_nothing_of_the_inner_one() -> None:
    def held() -> Iterator[None]:
        with torch_ops.use_backend("inductor"):
            yield

    outer = held()
    next(outer)
    with torch_ops.use_backend("torch"):
        outer.close()  # type: ignore[attr-defined]
        assert _ran() == ("torch", "scope")
    assert _ran() == ("torch", "declared")


def test_leaving_what_was_not_entered_is_refused() -> None:
    scope = torch_ops.use_backend("torch")
    with pytest.raises(TorchOpsError, match="a scope is left that this thread or task isn't in"):
        scope.__exit__(None, None, None)
    assert _ran() == ("torch", "declared")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_never_waits_for_a_lock_that_another_thread_held() -> None:
    x, stop = torch.randn(2, 4), threading.Event()
    ops.rms_norm(x)

    def churn() -> None:
        while not stop.is_set():
            torch_ops.set_backend(rms_norm="torch")()

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                import signal

                signal.alarm(20)  # a child that waits for ever ends by this
                ops.rms_norm(x)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_positions_in_the_memory_of_what_is_rotated_are_refused() -> None:
    positions = torch.zeros(12, dtype=torch.int64)
    q = positions.view(torch.float32).view(3, 1, 8)
    with pytest.raises(ValueError, match="memory apart from 'positions'"):
        ops.apply_rope_(q, torch.randn(3, 1, 8), torch.randn(8, 8), positions[:3])


@pytest.mark.parametrize("window", [2**31, 2**32 + 1, sys.maxsize])
def test_a_window_of_any_size_is_no_window(window: int) -> None:
    q, k = torch.randn(6, 4, 8), torch.randn(3, 2, 8)
    ends = torch.tensor([0, 6]).int(), torch.tensor([0, 3]).int()
    for is_causal in (False, True):
        dense, packed = (q[None], k[None], k[None], is_causal), (q, k, k, *ends, 6, 3, is_causal)
        for call, args in ((ops.attention, dense), (ops.varlen_attention, packed)):
            assert torch.equal(call(*args, window_left=window), call(*args))
        layer = torch_ops.attention.Attention(4, 8, 2, is_causal=is_causal, window_left=window)
        torch.testing.assert_close(layer(*dense[:3]), ops.attention(*dense))


@pytest.mark.parametrize("cap", [float("inf"), 1e39, -1.0, float("nan")])
def test_a_soft_cap_is_finite_in_float32(cap: float) -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"'logits_soft_cap' is .* finite in float32"):
        ops.attention(q, q, q, logits_soft_cap=cap)
    with pytest.raises(ValueError, match="logits_soft_cap"):
        torch_ops.attention.Attention(2, 8, logits_soft_cap=cap)


def test_heads_of_no_elements_have_no_scale_of_their_own() -> None:
    q, v = torch.zeros(1, 2, 1, 0), torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="'scale' is None for heads of no elements"):
        ops.attention(q, q, v)
    with pytest.raises(ValueError, match="'scale' is 1e\\+39"):
        ops.attention(v, v, v, scale=1e39)


def test_callables_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(ops.rms_norm)) is ops.rms_norm
    with pytest.raises(TypeError, match=r"^rms_norm\(\) got an unexpected"):
        ops.rms_norm(torch.ones(2), foo=1)


def test_a_kernel_that_exits_is_wrong() -> None:
    def leaves(x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)

    result = verify("silu_and_mul", leaves, dtypes=("float16",), profile="dev")
    assert not result.ok
    assert "which raised SystemExit: 0" in result.failures[0].detail
