"""What needs a process of its own: cold starts, threads, forks, and packages that may not load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Python

HEAVY = ("triton", "flashinfer", "sgl_kernel", "aiter", "cutlass", "transformers", "rich", "typer")


def test_heavy_packages_are_not_needed(python: Python) -> None:
    """Poisoned in ``sys.modules``: import, list, explain and the reference work all the same."""
    out = python(
        f"""
        import sys
        for name in {HEAVY!r}:
            sys.modules[name] = None
        import torch, torch_ops
        from torch_ops import ops
        x = torch.ones(2, 4)
        for op in torch_ops.registry.ops():
            declaration = getattr(ops, op).declaration
            assert torch_ops.explain(op).candidates, op
            assert torch_ops.select_kernel(op, "torch").backend == "torch"
        assert ops.rms_norm(x).shape == x.shape
        assert ops.fused_add_rms_norm_(x, x.clone(), torch.ones(4)) is None
        for platform in (torch_ops.Platform.cuda((9, 0)), torch_ops.Platform.rocm("gfx942")):
            explained = torch_ops.explain("rms_norm", platform=platform)
            print(explained)
            assert explained.chosen == "torch"
        print(sorted(b.value for b in torch_ops.Backend))
        """
    )
    assert "torch_ops" not in out
    assert "'torch'" in out


def test_backends_for_other_devices_are_never_imported(python: Python) -> None:
    """On a CPU, and on a simulated ROCm: CUDA-only packages stay unloaded, with the reason."""
    out = python(
        """
        import json, sys, torch, torch_ops
        rocm, cuda = torch_ops.Platform.rocm("gfx1030"), torch_ops.Platform.cuda((8, 0))
        reasons = {}
        for name, platform in (("rocm", rocm), ("cuda", cuda), ("cpu", torch_ops.Platform.cpu())):
            explained = torch_ops.explain("rms_norm", platform=platform)
            reasons[name] = [r for c in explained.candidates if c.backend == "absent"
                             for r in c.reasons]
        torch_ops.ops.rms_norm(torch.ones(2, 4))
        print(json.dumps([reasons, "torch_ops_absent.rms_norm" in sys.modules]))
        """,
        "absent",
    )
    reasons, imported = json.loads(out)
    assert not imported
    assert "arch gfx1030 (supported: gfx942)" in reasons["rocm"][0]
    assert "CUDA only (device is 'rocm')" in reasons["rocm"][0]
    assert "arch sm_80 is too old (supported: sm_90 and newer)" in reasons["cuda"][0]
    assert "CUDA only (device is 'cpu')" in reasons["cpu"][0]


COUNTING = """
import pathlib, threading, time
import torch

with open({log!r}, "a") as log:
    log.write("imported\\\\n")
time.sleep(0.2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None,
             eps: float = 1e-6) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor
    assert not isinstance(x, FakeTensor)
    path = pathlib.Path({cache!r})
    if not path.exists():
        path.mkdir()
        assert path.stat().st_mode
        with open({log!r}, "a") as log:
            log.write("built\\\\n")
    return torch.full_like(x, 3)
"""


@pytest.fixture
def lazy(tmp_path: Path) -> Path:
    """A backend that takes its time to import, and that builds something at its first call."""
    package = tmp_path / "other-site" / "torch_ops_lazy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    log, cache = str(tmp_path / "log"), str(tmp_path / "cache")
    (package / "rms_norm.py").write_text(
        COUNTING.format(log=log, cache=cache).replace("\\\\", "\\")
    )
    info = tmp_path / "other-site" / "lazy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch_ops.backends]\nlazy = torch_ops_lazy\n")
    return tmp_path / "log"


def test_sixteen_threads_make_the_first_call_at_once(python: Python, lazy: Path) -> None:
    """Loaded exactly once, one result, no deadlock; other threads' scopes are not seen."""
    out = python(
        """
        import threading, torch, torch_ops
        barrier, results = threading.Barrier(16), []
        def call(index):
            barrier.wait()
            if index % 2:
                value = torch_ops.ops.rms_norm(torch.ones(2, 4), backend="lazy")
            else:
                with torch_ops.use_backend("lazy"):
                    value = torch.ops.torch_ops.rms_norm(torch.ones(2, 4))
            results.append(float(value[0, 0]))
        threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(results == [3.0] * 16, float(torch_ops.ops.rms_norm(torch.ones(2, 4))[0, 0]) < 1)
        """
    )
    assert out.split() == ["True", "True"]
    assert lazy.read_text().split().count("imported") == 1


def test_a_cold_op_compiles_whole(python: Python, lazy: Path) -> None:
    """Nothing is loaded or built while tracing: the kernel's body sees real tensors alone."""
    out = python(
        """
        import torch, torch_ops
        compiled = torch.compile(
            lambda x: torch_ops.ops.rms_norm(x, backend="lazy") + torch.ops.torch_ops.rms_norm(x),
            backend="aot_eager", fullgraph=True)
        y = compiled(torch.ones(2, 4))
        y = compiled(torch.ones(2, 4))
        print(float(y[0, 0]) > 3.9, torch._dynamo.utils.counters["stats"]["unique_graphs"])
        print(dict(torch._dynamo.utils.counters["graph_break"]))
        """
    )
    assert out.split() == ["True", "1", "{}"]
    assert lazy.read_text().split() == ["imported", "built"]


def test_forked_workers(python: Python) -> None:
    """A child has what its parent had resolved, and its own changes stay its own."""
    out = python(
        """
        import os, sys, torch, torch_ops
        from torch_ops import ops
        torch.set_num_threads(1)
        def chosen():
            with torch_ops.trace() as seen:
                ops.silu_and_mul(torch.ones(2, 4))
            return seen.records[0].backend.value + " " + seen.records[0].source
        print("parent", chosen()); sys.stdout.flush()
        def child(work):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work(); sys.stdout.flush(); code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0
        def by_environment():
            print("inherits", chosen())
            os.environ["TORCH_OPS_BACKEND"] = "silu_and_mul=acme"
            torch_ops.refresh()
            print("child", chosen())
        def by_process():
            torch_ops.set_backend("acme")
            print("child", chosen())
        child(by_environment); child(by_process)
        with torch_ops.use_backend("acme"):
            child(lambda: print("scoped", chosen()))
        print("parent", chosen())
        """,
        "acme",
    )
    assert out.splitlines() == [
        "parent torch declared",
        "inherits torch declared",
        "child acme environment",
        "child acme process",
        "scoped acme scope",
        "parent torch declared",
    ]


def test_spawned_workers_unpickle_what_is_sent(python: Python) -> None:
    out = python(
        """
        import pickle, sys, torch, torch_ops
        from torch_ops import KernelSpec, Platform, Requirement
        spec = KernelSpec("x", "acme", "m:f", [Requirement.cuda((9, 0))])
        try:
            torch_ops.ops.rms_norm(torch.ones(2, 4), backend="acme")
        except torch_ops.TorchOpsError as error:
            sent = [spec, Platform.cpu(), error, torch_ops.explain("rms_norm")]
        print(pickle.dumps(sent).hex())
        """,
        "acme",
    )
    received = python(
        f"""
        import pickle, torch_ops
        spec, platform, error, explained = pickle.loads(bytes.fromhex({out.strip()!r}))
        print(spec.backend is torch_ops.Backend("acme"), platform == torch_ops.Platform.cpu(),
              type(error).__name__, error.reasons, explained.chosen is torch_ops.Backend.TORCH)
        """
    )
    assert received.strip() == (
        "True True BackendUnavailableError ('weight is None (required)',) True"
    )


def test_nothing_that_operators_need_is_collected(python: Python) -> None:
    """After the collector, and after all kernels are gone: errors of ours, and a clean exit."""
    out = python(
        """
        import gc, torch, torch_ops
        from torch_ops.declarations import catalogue
        held = [getattr(torch.ops.torch_ops, op).default for op in catalogue()]
        del catalogue
        for _ in range(3):
            gc.collect()
        x = torch.ones(2, 4)
        torch.ops.torch_ops.rms_norm(x)
        for op in torch_ops.registry.ops():
            for spec in torch_ops.registry.get(op):
                torch_ops.registry.unregister(spec)
        gc.collect()
        try:
            torch.ops.torch_ops.rms_norm(x)
        except torch_ops.NoBackendError as error:
            print(str(error).splitlines()[0])
        compiled = torch.compile(torch.ops.torch_ops.silu_and_mul, backend="eager")
        try:
            compiled(x)
        except torch_ops.NoBackendError as error:
            print(str(error).splitlines()[0])
        torch_ops.refresh()
        print(torch.ops.torch_ops.rms_norm(x).shape)
        """
    )
    assert out.splitlines() == [
        "op 'rms_norm' has no backend usable on device 'cpu'",
        "op 'silu_and_mul' has no backend usable on device 'cpu'",
        "torch.Size([2, 4])",
    ]


def test_a_typo_in_the_environment_is_no_error_of_the_import(python: Python) -> None:
    out = python(
        """
        import torch, torch_ops
        print("imported")
        try:
            torch.ops.torch_ops.rms_norm(torch.ones(2, 4))
        except torch_ops.UnknownVariableError as error:
            print(error)
        """,
        TORCH_OPS_BACKNED="triton",
    )
    first, second = out.splitlines()
    assert first == "imported"
    assert second == (
        "Unknown environment variable TORCH_OPS_BACKNED='triton'. Known: TORCH_OPS_BACKEND, "
        "TORCH_OPS_DISABLE. Did you mean 'TORCH_OPS_BACKEND'?"
    )


def test_environment_names_plugins_and_their_ops(python: Python) -> None:
    out = python(
        """
        import torch, torch_ops
        print(torch_ops.explain("silu_and_mul", torch.ones(2, 4)))
        """,
        "acme",
        TORCH_OPS_BACKEND="silu_and_mul=acme",
    )
    assert ": acme (environment)" in out.splitlines()[0]
