"""Models in place of the packages that the backends wrap."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_ops
from torch_ops import once, policy

from . import examples, model_aiter, model_flashinfer, model_sgl_kernel, sites

_modules = examples.part("flashinfer", "_modules")
_prefill = examples.part("flashinfer", "_prefill")
_ragged = examples.part("flashinfer", "_ragged")
_sequences = examples.part("flashinfer", "_sequences")
_latents = examples.part("flashinfer", "mla_decode")
_library = examples.part("sgl_kernel", "_library")
_aiter = examples.part("aiter", "_library")
_CACHED = (
    _modules.norm, _modules.activation, _modules.rope, _modules.cascade, _modules.product,
    _prefill._single, _ragged.load, _latents.load, _library.operator, _aiter.function,
)  # fmt: skip
_NAMES = ("flashinfer", "sgl_kernel", "aiter", "attention layer")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test here."""


def _forget() -> None:
    policy.invalidate()
    for function in _CACHED:
        function.cache_clear()
    _ragged._plans.clear()
    _sequences._wrappers.clear()
    for kept in (once._made, once._failures):
        for key in [key for key in kept if isinstance(key, tuple) and key[0] in _NAMES]:
            del kept[key]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing of the packages is loaded, before and after."""
    _forget()
    yield
    _forget()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Both packages are found; importing one fails the test."""
    for backend, (module, _, _) in sites.PACKAGES.items():
        sites.install(tmp_path, backend)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    yield tmp_path
    for module, _, _ in sites.PACKAGES.values():
        assert module not in sys.modules
    monkeypatch.undo()
    torch_ops.refresh()


class _Stream:
    """The current stream of a machine without a GPU."""

    def synchronize(self) -> None:
        """Return at once."""


@pytest.fixture
def flashinfer(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[model_flashinfer.Model]:
    """FlashInfer, as a model on the CPU."""
    model = model_flashinfer.Model()
    model.install(monkeypatch)
    stream = _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: model_flashinfer.HANDLE)
    yield model
    monkeypatch.undo()


@pytest.fixture
def sgl_kernel(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[model_sgl_kernel.Model]:
    """sgl-kernel, as a model on the CPU."""
    model = model_sgl_kernel.Model()
    model.install(monkeypatch)
    yield model
    monkeypatch.undo()


@pytest.fixture
def aiter(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[model_aiter.Model]:
    """AITER, as a model on the CPU."""
    model = model_aiter.Model()
    model.install(monkeypatch)
    yield model
    monkeypatch.undo()
