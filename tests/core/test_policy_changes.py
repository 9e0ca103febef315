"""Fifty changes of policy among four choices, by every way to choose: right, and four graphs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import torch_ops
from torch_ops import buckets, ops, tuning
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform

from .toy import Toy

VALUES = {"torch": 1.0, "triton": 2.0, "sgl_kernel": 3.0}
FOURTH = {"cpu": "inductor", "cuda": "flashinfer"}  # each in the op's declared order there
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
FORMS = [
    pytest.param("cpu", "default", id="cpu"),
    pytest.param("cuda", "default", id="cuda", marks=ON_GPU),
    pytest.param("cuda", "reduce-overhead", id="cuda graphs", marks=ON_GPU),
]


class Policy:
    """The ways to choose a kernel of ``toy``."""

    def __init__(
        self, x: torch.Tensor, names: list[str], folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        self._patch, self._tables = patch, dict[str, Path]()
        bucket = buckets.bucket(catalogue()["toy"], (x,))
        device = tuning.device_name(Platform.detect(x.device))
        for name in names:
            us = {each: 1.0 if each == name else 2.0 for each in names}
            self._tables[name] = folder / f"{name}.json"
            written = tuning.written(device, {"toy": [tuning.Row(bucket, us)]})
            self._tables[name].write_text(json.dumps(written))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        with torch_ops.use_backend(toy=name):
            yield

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        undo = torch_ops.set_backend(toy=name)
        yield
        undo()

    @contextmanager
    def environment(self, name: str) -> Iterator[None]:
        self._patch.setenv("TORCH_OPS_BACKEND", f"toy={name}")
        torch_ops.refresh()
        yield
        self._patch.delenv("TORCH_OPS_BACKEND")
        torch_ops.refresh()

    @contextmanager
    def table(self, name: str) -> Iterator[None]:
        torch_ops.load_tuning_table(self._tables[name])
        yield
        torch_ops.clear_tuning_table()


@pytest.mark.parametrize(("device", "mode"), FORMS)
def test_fifty_changes_among_four_choices(
    device: str, mode: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = VALUES | {FOURTH[device]: 4.0}
    for backend, number in values.items():
        toy.serve(backend, number)
    torch._dynamo.reset()
    counters.clear()
    x = torch.ones(2, 4, device=device)
    compiled = torch.compile(lambda x: ops.toy(x) + 1, mode=mode, fullgraph=True)
    tabled = [name for name in values if name != "sgl_kernel"]  # which no declared order names
    policy, pick = Policy(x, tabled, tmp_path, monkeypatch), random.Random(0)

    def value() -> float:
        torch.compiler.cudagraph_mark_step_begin()
        return float(compiled(x)[0, 0]) - 1

    with torch.no_grad():
        for _ in range(50):
            name, way = pick.choice(list(values)), pick.choice(["scope", "process", "environment"])
            with getattr(policy, way)(name):
                assert value() == values[name], way
        assert counters["stats"]["unique_graphs"] == 4
        for name in tabled * 2:
            with policy.table(name):
                assert value() == values[name]
        # A table is a choice of its own: an order of kernels, by the shape of the call.
        assert counters["stats"]["unique_graphs"] == 4 + len(tabled)
        if mode == "reduce-overhead":
            _replays(toy, values, value)


def _replays(toy: Toy, values: dict[str, float], value: Callable[[], float]) -> None:
    """Each choice replays its recording: no kernel's body runs."""
    for name in values:
        with torch_ops.use_backend(toy=name):
            for _ in range(3):  # warms up, records
                value()
    before = toy.calls.copy()
    for name in list(values) * 2:
        with torch_ops.use_backend(toy=name):
            assert value() == values[name]
    assert toy.calls == before
