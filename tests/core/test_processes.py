"""What needs a process of its own: cold starts, threads, forks, and packages that may not load."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch

import torch_ops
from torch_ops import BackendUnavailableError, KernelSpec, Platform, Requirement

from .conftest import Install, Python

HEAVY = ("triton", "flashinfer", "sgl_kernel", "aiter", "cutlass", "transformers", "rich", "typer")


def test_packages_of_other_devices_are_neither_needed_nor_loaded(python: Python) -> None:
    """Poisoned in ``sys.modules``: import, list, explain and the reference work all the same.

    On a CPU and on simulated GPUs; a CUDA-only backend is refused on ROCm without being imported.
    """
    out = python(
        f"""
        import json, sys
        for name in {HEAVY!r}:
            sys.modules[name] = None
        import torch, torch_ops
        from torch_ops import Platform, ops
        x = torch.ones(2, 4)
        for op in torch_ops.registry.ops():
            assert torch_ops.explain(op).candidates, op
            assert torch_ops.select_kernel(op, "torch").backend == "torch"
        assert ops.rms_norm(x).shape == x.shape
        assert ops.fused_add_rms_norm_(x, x.clone(), torch.ones(4)) is None
        reasons = {{}}
        for name, platform in (("rocm", Platform.rocm("gfx1030")),
                               ("cuda", Platform.cuda((8, 0))), ("cpu", Platform.cpu())):
            explained = torch_ops.explain("rms_norm", platform=platform)
            assert explained.chosen == "torch"
            reasons[name] = [r for c in explained.candidates if c.backend == "absent"
                             for r in c.reasons]
        print(json.dumps([reasons, "torch_ops_absent.rms_norm" in sys.modules]))
        """,
        "absent",
    )
    reasons, imported = json.loads(out)
    assert not imported
    assert "arch gfx1030 (supported: gfx942)" in reasons["rocm"][0]
    assert "CUDA only (device is 'rocm')" in reasons["rocm"][0]
    assert "arch sm_80 is too old (supported: sm_90 and newer)" in reasons["cuda"][0]
    assert "CUDA or ROCm only (device is 'cpu')" in reasons["cpu"][0]


KERNEL = """
import pathlib, time
import torch
from torch._subclasses.fake_tensor import FakeTensor


def note(word: str) -> None:
    with open({log!r}, "a") as log:
        log.write(word + " ")


note("imported-{op}")
time.sleep(0.2)


def {op}({parameters}) -> torch.Tensor:
    assert not isinstance(x, FakeTensor)
    path = pathlib.Path({cache!r})
    if not path.exists():
        path.mkdir(exist_ok=True)
        assert path.stat().st_mode
        note("built-{op}")
    return torch.full_like(x, 3)
"""
PARAMETERS = {
    "rms_norm": "x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6",
    "gemma_rms_norm": "x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6",
}


@pytest.fixture
def lazy(tmp_path: Path) -> Path:
    """A backend that takes its time to import, and that builds something at its first call."""
    package = tmp_path / "other-site" / "torch_ops_lazy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for op, parameters in PARAMETERS.items():
        log, cache = str(tmp_path / "log"), str(tmp_path / f"cache-{op}")
        kernel = KERNEL.format(log=log, cache=cache, op=op, parameters=parameters)
        (package / f"{op}.py").write_text(kernel)
    info = tmp_path / "other-site" / "lazy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch_ops.backends]\nlazy = torch_ops_lazy\n")
    return tmp_path / "log"


def test_first_calls(python: Python, lazy: Path) -> None:
    """Of 16 threads at once: loaded exactly once, one result. In compiled code: in one graph.

    Nothing is loaded or built while tracing: the kernel's body sees real tensors alone.
    """
    out = python(
        """
        import threading, torch, torch_ops
        from torch._dynamo.utils import counters
        from torch_ops import ops
        x, weight = torch.ones(2, 4), torch.ones(4)
        barrier, results = threading.Barrier(16), []
        def call(index):
            barrier.wait()
            if index % 2:
                value = ops.rms_norm(x, backend="lazy")
            else:
                with torch_ops.use_backend("lazy"):
                    value = torch.ops.torch_ops.rms_norm(x)
            results.append(float(value[0, 0]))
        threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(results == [3.0] * 16, float(ops.rms_norm(x)[0, 0]) < 1)
        compiled = torch.compile(
            lambda x: ops.gemma_rms_norm(x, weight, backend="lazy") + ops.gemma_rms_norm(x, weight),
            backend="aot_eager", fullgraph=True)
        print(all(float(compiled(x)[0, 0]) > 3.9 for _ in range(2)),
              counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
        """
    )
    assert out.split() == ["True", "True", "True", "1", "{}"]
    words = Counter(lazy.read_text().split())
    assert words["imported-rms_norm"] == 1
    assert words["imported-gemma_rms_norm"] == words["built-gemma_rms_norm"] == 1


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


def test_spawned_workers_unpickle_what_is_sent(
    install: Install, python: Python, tmp_path: Path
) -> None:
    """Members, specs, platforms, errors and explanations; a plugin that is absent is named."""
    install("acme")
    spec = KernelSpec("x", "acme", "m:f", [Requirement.cuda((9, 0))])
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.ops.rms_norm(torch.ones(2, 4), backend="acme")
    sent = [spec, Platform.cpu(), raised.value, torch_ops.explain("rms_norm")]
    received = python(
        f"""
        import importlib, pickle, sys, torch_ops
        data = bytes.fromhex({pickle.dumps(sent).hex()!r})
        try:
            pickle.loads(data)
        except ValueError as error:
            print(str(error).partition(" Known")[0])
        sys.path.append({str(tmp_path / "site")!r})
        torch_ops.refresh()
        spec, platform, error, explained = pickle.loads(data)
        print(spec.backend is torch_ops.Backend("acme"), platform == torch_ops.Platform.cpu(),
              type(error).__name__, error.reasons, explained.chosen is torch_ops.Backend.TORCH)
        """
    )
    assert received.splitlines() == [
        "'acme' is not a Backend.",
        "True True BackendUnavailableError ('weight is None (required)',) True",
    ]


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


def test_the_environment_of_a_new_process(python: Python) -> None:
    """A typo is no error of the import; a plugin can be named before it is looked for."""
    out = python(
        """
        import os, torch, torch_ops
        print("imported")
        x = torch.ones(2, 4)
        try:
            torch.ops.torch_ops.silu_and_mul(x)
        except torch_ops.UnknownVariableError as error:
            print(error)
        del os.environ["TORCH_OPS_BACKNED"]
        torch_ops.refresh()
        print(torch_ops.explain("silu_and_mul", x))
        """,
        "acme",
        TORCH_OPS_BACKNED="triton",
        TORCH_OPS_BACKEND="silu_and_mul=acme",
    )
    first, second, third, *_ = out.splitlines()
    assert first == "imported"
    assert second == (
        "Unknown environment variable TORCH_OPS_BACKNED='triton'. Known: TORCH_OPS_BACKEND, "
        "TORCH_OPS_DISABLE, TORCH_OPS_INLINE, TORCH_OPS_REQUIRE, TORCH_OPS_TUNING_TABLE. "
        "Did you mean 'TORCH_OPS_BACKEND'?"
    )
    assert ": acme (environment)" in third


def test_distributed_tensors_are_refused_by_name(python: Python) -> None:
    """Never is a kernel run on the local part of one."""
    out = python(
        """
        import tempfile, torch, torch_ops
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate()])
        with torch_ops.trace() as seen:
            try:
                torch.ops.torch_ops.rms_norm(x)
            except NotImplementedError as error:
                print(error)
        print(seen.records)
        dist.destroy_process_group()
        """
    )
    first, second = out.splitlines()
    assert "Operator torch_ops.rms_norm.default does not have a sharding strategy" in first
    assert second == "[]"
