"""Devices side by side in one process, hidden devices, and forks, where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import torch_ops
from torch_ops import Backend, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


def _python(script: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_platform_is_that_of_the_tensors() -> None:
    for device, backend in (("cpu", Backend.TORCH), ("cuda", Backend.TRITON)) * 2:
        x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
        with torch_ops.trace() as seen:
            y = torch.ops.torch_ops.rms_norm(x, weight)
        assert y.device.type == device
        assert [record.backend for record in seen.records] == [backend]


def test_compiled_for_both_devices_in_turn() -> None:
    compiled = torch.compile(ops.silu_and_mul, fullgraph=True)
    x = torch.randn(4, 64)
    expected = ops.silu_and_mul(x)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        y = compiled(x.to(device))  # type: ignore[no-untyped-call]
        assert y.device.type == device
        torch.testing.assert_close(y.cpu(), expected)


def test_no_visible_gpu() -> None:
    out = _python(
        """
        import torch, torch_ops
        assert not torch.cuda.is_available()
        x = torch.randn(3, 64)
        with torch_ops.trace() as seen:
            torch_ops.ops.rms_norm(x, torch.ones(64))
        print(seen.records[0].backend.value)
        try:
            torch_ops.ops.rms_norm(x, torch.ones(64), backend="triton")
        except torch_ops.BackendUnavailableError as error:
            print("CUDA only" in str(error))
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert out == ["torch", "True"]


def test_a_fork_after_cuda_serves_cpu_tensors_and_says_what_pytorch_says() -> None:
    out = _python(
        """
        import os, sys, traceback, torch, torch_ops
        from torch_ops import ops
        x, w = torch.randn(3, 64, device="cuda"), torch.ones(64, device="cuda")
        expected = ops.rms_norm(x, w).cpu()
        host, host_w = x.cpu(), w.cpu()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                y = ops.rms_norm(host, host_w)
                print("cpu", bool(torch.allclose(y, expected, atol=1e-5)))
                try:
                    torch.zeros(1, device="cuda")
                except RuntimeError as error:
                    print("cuda", "Cannot re-initialize CUDA in forked subprocess" in str(error))
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        print("parent", torch.equal(ops.rms_norm(x, w).cpu(), expected))
        """
    )
    assert out == ["cpu True", "cuda True", "parent True"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("backend", ["triton", "flashinfer", "sgl_kernel", "torch", None])
def test_tensors_on_another_gpu_than_the_current(backend: str | None) -> None:
    x = torch.randn(33, 512).bfloat16()
    weight = torch.randn(512).bfloat16()
    expected = ops.rms_norm(x.to("cuda:0"), weight.to("cuda:0"), backend=backend)
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        found = ops.rms_norm(x.to("cuda:1"), weight.to("cuda:1"), backend=backend)
        assert found.device == torch.device("cuda", 1)
        assert torch.equal(found.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0
