"""Where the wrapped packages may run, and that they are never imported anywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torch_ops
from torch_ops import Backend, BackendUnavailableError, Platform, calls, discovery, ops
from torch_ops.declarations import catalogue
from torch_ops.registry import registry

from . import sites

HOPPER = Platform.cuda((9, 0))
ELSEWHERE = [
    Platform.cpu(),
    Platform.rocm("gfx90a"),
    Platform.rocm("gfx942:sramecc+:xnack-"),
    Platform.rocm("gfx950"),
    Platform.rocm("gfx1100"),
    Platform.rocm("gfx1201"),
]
SERVED = {
    backend: [op for op in registry.ops() if backend in [s.backend.value for s in registry.get(op)]]
    for backend in sites.PACKAGES
}
EVERY = [(backend, op) for backend, served in SERVED.items() for op in served]


def test_what_they_serve() -> None:
    shared = {
        "apply_rope", "apply_rope_", "fused_add_rms_norm", "fused_add_rms_norm_", "gelu_and_mul",
        "gelu_tanh_and_mul", "gemma_fused_add_rms_norm", "gemma_rms_norm", "merge_state",
        "rms_norm", "silu_and_mul",
    }  # fmt: skip
    only = {
        "mla_decode",
        "quantize_fp8_per_group",
        "scaled_mm_fp8",
        "scaled_mm_int8",
        "topk_softmax",
    }
    assert set(SERVED["sgl_kernel"]) == shared | only
    sequences = {"varlen_attention", "varlen_attention_with_lse", "paged_prefill", "paged_decode"}
    sequences |= {"mla_decode"}
    dense = {"layer_norm", "attention", "attention_with_lse", "scaled_mm_fp8"}
    assert set(SERVED["flashinfer"]) == shared | dense | sequences


@pytest.mark.parametrize("backend", sites.PACKAGES)
def test_every_other_op_is_declined_with_a_reason(backend: str) -> None:
    declined = discovery.packages()[backend].declined
    assert set(declined) == set(catalogue()) - set(SERVED[backend])
    for reason in declined.values():
        assert reason[0].islower()
        assert not reason.endswith(".")


@pytest.mark.parametrize("platform", ELSEWHERE, ids=str)
@pytest.mark.parametrize(("backend", "op"), EVERY)
def test_refused_elsewhere_and_not_imported(
    installed: Path, backend: str, op: str, platform: Platform
) -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.select_kernel(op, backend, platform=platform)
    assert raised.value.reasons == (f"CUDA only (device is {platform.device!r})",)
    assert torch_ops.select_kernel(op, platform=platform).backend.value != backend


@pytest.mark.parametrize(("backend", "op"), EVERY)
def test_found_on_an_nvidia_gpu_and_not_imported(installed: Path, backend: str, op: str) -> None:
    spec = torch_ops.select_kernel(op, backend, platform=HOPPER)
    assert spec.target == f"torch_ops.backends.{backend}.{op}:{op}"
    (candidate,) = [
        c for c in torch_ops.explain(op, platform=HOPPER).candidates if c.backend == backend
    ]
    assert candidate.usable
    assert candidate.state in ("found", "imported", "verified")


@pytest.mark.parametrize("backend", sites.PACKAGES)
def test_architectures_side_by_side(installed: Path, backend: str) -> None:
    """One process, GPUs of several kinds: each is judged by itself, in any order."""
    for _ in range(2):
        for capability in [(7, 5), (8, 0), (9, 0), (10, 0)]:
            platform = Platform.cuda(capability)
            if capability >= (8, 0):
                spec = torch_ops.select_kernel("rms_norm", backend, platform=platform)
                assert spec.backend == backend
                continue
            with pytest.raises(BackendUnavailableError) as raised:
                torch_ops.select_kernel("rms_norm", backend, platform=platform)
            assert raised.value.reasons == ("arch sm_75 is too old (supported: sm_80 and newer)",)


def test_plans_for_unlike_gpus_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"cuda:0": Platform.cuda((9, 0), 0), "cuda:1": Platform.cuda((8, 0), 1)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(Platform, "detect", lambda device=None: kinds[str(device)])
    assert not calls._one_kind()
    kinds["cuda:1"] = Platform.cuda((9, 0), 1)
    assert calls._one_kind()


@pytest.mark.parametrize(("backend", "op"), EVERY)
def test_each_op_can_be_denied(
    installed: Path, monkeypatch: pytest.MonkeyPatch, backend: str, op: str
) -> None:
    other = next(name for name in SERVED[backend] if name != op)
    monkeypatch.setenv("TORCH_OPS_DISABLE", f"{op}:{backend}")
    torch_ops.refresh()
    with pytest.raises(BackendUnavailableError, match=f"TORCH_OPS_DISABLE={op}:{backend}"):
        torch_ops.select_kernel(op, backend, platform=HOPPER)
    assert torch_ops.select_kernel(op, platform=HOPPER).backend != backend
    assert torch_ops.select_kernel(other, backend, platform=HOPPER).backend == backend
    monkeypatch.setenv("TORCH_OPS_DISABLE", backend)
    torch_ops.refresh()
    with pytest.raises(BackendUnavailableError, match=f"TORCH_OPS_DISABLE={backend}"):
        torch_ops.select_kernel(op, backend, platform=HOPPER)


@pytest.mark.parametrize("backend", sites.PACKAGES)
@pytest.mark.parametrize("version", ["0.0.1", "9.0"])
def test_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, version: str
) -> None:
    module, distribution, supported = sites.PACKAGES[backend]
    sites.install(tmp_path, backend, version)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    name = distribution.replace("_", "-")
    with pytest.raises(BackendUnavailableError, match=f"{name} {version} .supported: at least"):
        torch_ops.select_kernel("rms_norm", backend, platform=HOPPER)
    assert supported in str(torch_ops.explain("rms_norm", platform=HOPPER))
    monkeypatch.undo()
    torch_ops.refresh()


POISONED = """
    import sys

    class Poison:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("aiter", "flashinfer", "sgl_kernel", "triton"):
                raise AssertionError(f"{name} was looked for")

    if {blocked}:
        sys.modules.update(dict.fromkeys(("aiter", "flashinfer", "sgl_kernel", "triton")))
    import torch
    import torch_ops
    from torch_ops import Platform, ops

    x, w = torch.randn(3, 64), torch.randn(64)
    ops.rms_norm(x, w)
    for op in torch_ops.registry.ops():
        for platform in (Platform.cpu(), Platform.rocm("gfx942"), Platform.cuda((9, 0))):
            str(torch_ops.explain(op, platform=platform))
        torch_ops.select_kernel(op, "torch", platform=Platform.rocm("gfx942"))
    assert not any(sys.modules.get(name) for name in ("aiter", "flashinfer", "sgl_kernel"))
    print("done")
"""


@pytest.mark.parametrize("blocked", [False, True])
def test_nothing_is_imported_to_list_explain_and_run(tmp_path: Path, blocked: bool) -> None:
    """Packages that raise at their import, and packages that ``sys.modules`` says aren't there."""
    for backend in sites.EVERY:
        sites.install(tmp_path, backend)
    assert sites.python(POISONED.replace("{blocked}", str(blocked)), tmp_path) == "done\n"


def test_no_visible_gpu(tmp_path: Path) -> None:
    for backend in sites.PACKAGES:
        sites.install(tmp_path, backend)
    script = """
        import sys
        import torch
        import torch_ops
        from torch_ops import Backend, Platform, ops

        assert Platform.detect() == Platform.cpu()
        x, w = torch.randn(3, 64), torch.randn(64)
        with torch_ops.trace() as seen:
            ops.rms_norm(x, w)
        assert [r.backend for r in seen.records] == [Backend.TORCH]
        reasons = {c.backend: c.reasons for c in torch_ops.explain("rms_norm", x, w).candidates}
        assert reasons["flashinfer"][0] == "CUDA only (device is 'cpu')", reasons
        assert reasons["sgl_kernel"][0] == "CUDA only (device is 'cpu')", reasons
        assert not {"flashinfer", "sgl_kernel"} & set(sys.modules)
    """
    sites.python(script, tmp_path, CUDA_VISIBLE_DEVICES="")


def test_cpu_tensors_where_there_is_a_gpu(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform is that of the tensors, not the best of the machine."""
    real = Platform.detect
    monkeypatch.setattr(
        Platform, "detect", lambda device=None: HOPPER if device is None else real(device)
    )
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch_ops.select_kernel("rms_norm").backend is not Backend.TORCH
    assert torch_ops.select_kernel("rms_norm", args=(x, weight, 1e-6)).backend is Backend.TORCH
    with torch_ops.trace() as seen:
        ops.rms_norm(x, weight)
    assert [record.backend for record in seen.records] == [Backend.TORCH]
    with pytest.raises(BackendUnavailableError, match="CUDA only"):
        ops.rms_norm(x, weight, backend="flashinfer")
