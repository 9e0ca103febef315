"""Fixtures of all tests: where tensors go, and what is put back after each test."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from torch_ops import discovery, fusion, inlining, kernels, policy, tuning
from torch_ops.registry import registry
from torch_ops.testing.profiles import PROFILES

# Few tests each, of minutes: begun last, one of them would run beside idle processes.
SLOW = (
    "tests/demo/", "tests/test_readme.py", "tests/integrations/", "tests/cases/test_selection.py",
    "tests/backends/test_triton",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests' tensors are: the GPU of this machine, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="session")
def same_examples() -> None:
    """Draw the same examples in every run: the profile for development draws others each time."""
    dev = PROFILES["dev"]
    fixed = settings(dev.settings, derandomize=True, database=None)
    PROFILES["dev"] = dataclasses.replace(dev, settings=fixed)


@pytest.fixture
def uncompiled_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Inductor's attention run as Dynamo traces it, for tests of what is chosen."""
    module = importlib.import_module("torch_ops.backends.inductor.attention")
    monkeypatch.setattr(module, "_functions", {})
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring to small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put back the registry, choices and tables, the environment and the scanned plugins."""
    variables = dict(os.environ)
    parsed = policy.env()
    plugins = discovery.packages()
    chosen = list(policy._process)
    specs = {op: dict(held) for op, held in registry._specs.items()}
    sites = dict(registry._sites)
    loaded = dict(kernels._kernels)
    yield
    if dict(os.environ) != variables:
        os.environ.clear()
        os.environ.update(variables)
    if discovery.packages() != plugins:
        discovery.rescan()
    if registry._specs != specs:
        registry._specs = specs
        registry._sites = sites
        policy.invalidate()
    if tuning._loaded:
        tuning.clear_tuning_table()
    if inlining._process or fusion._disabled:
        inlining._process.clear()
        fusion._disabled.clear()
        policy.invalidate()
    if policy._process != chosen:
        policy._process[:] = chosen
        policy.invalidate()
    foreign = [s for s in kernels._kernels if not s.target.startswith("torch_ops.backends.")]
    for spec in foreign:
        if spec not in loaded:
            del kernels._kernels[spec]
            policy.invalidate()
    if policy._environment != parsed:
        policy.forget_environment()


@pytest.fixture
def opaque(restored: None) -> None:
    """Let every op stay one call in compiled graphs."""
    inlining.set_inline(False)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled code before and after, so that a test counts its own compiles."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
