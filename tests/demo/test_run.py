"""The demo with the real weights: everything that it promises, but speed is only reported."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import compile_fx

import torch_ops.demo
from torch_ops.demo import session
from torch_ops.demo.decoding import eager
from torch_ops.demo.progress import Silent
from torch_ops.demo.report import Report
from torch_ops.demo.session import Settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # what transformers warns of is not ours to fail for
]


@pytest.fixture(
    scope="module", params=["traced", pytest.param("compiled", marks=pytest.mark.exhaustive)]
)
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """One run, measuring little: a busy machine measures nothing anyway.

    Inductor takes a minute for each model: graphs run as they were traced, where not all is tried.
    The file of the weights is read once, not by each of those who look into it.
    """
    pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "traced":
            patch.setattr(compile_fx, "compile_fx", lambda graph, inputs: graph)
            for name in ("GGUFReader", "get_tensor_name_map"):
                patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
            patch.setattr(session, "static", lambda model, slots: eager(model))
        yield _run()


def _run() -> Report:
    settings = Settings(measured=4, rounds=1)
    return torch_ops.demo.run(settings=settings, progress=Silent())


def test_the_answer_names_paris(report: Report) -> None:
    assert "Paris" in report.answer


def test_it_is_compiled_whole_and_few_times(report: Report) -> None:
    assert report.graph_breaks == 0
    assert report.graphs_before == 2
    assert report.graphs_after <= 4
    assert len(report.swaps) == 4
    assert report.swaps[0].graphs <= 1
    assert [swap.graphs for swap in report.swaps[1:]] == [0, 0, 0]


def test_the_logits_are_the_untouched_models(report: Report) -> None:
    assert 0 <= report.max_logit_diff <= 1e-3
    assert report.unexplained == 0


def test_half_of_the_layers_were_swapped_and_put_back(report: Report) -> None:
    layers = report.layers
    assert len(layers) == 30
    assert [layer.during for layer in layers] == ["torch_math", "torch_flash"] * 15
    assert all(layer.before == layer.after == "torch_flash" for layer in layers)


def test_every_op_ran_as_often_as_the_model_has_it(report: Report) -> None:
    calls = {(call.op, call.backend): call.calls for call in report.calls}
    steps = calls["rms_norm", "torch"]  # the first norm; those behind an addition are fused with it
    assert steps > 4
    assert calls["fused_add_rms_norm", "torch"] == 60 * steps
    assert calls["apply_rope", "torch"] == 30 * steps
    assert calls["silu_and_mul", "torch"] == 30 * steps
    swapped = calls["attention", "torch_math"]
    assert swapped > 0
    assert swapped % 15 == 0
    assert swapped + calls["attention", "torch_flash"] == 30 * steps
    sources = {call.source for call in report.calls if call.backend == "torch_math"}
    assert sources == {"layer"}


def test_speeds_are_measured(report: Report) -> None:
    assert report.tokens_per_s > 0
    assert report.baseline_eager_tokens_per_s > 0
    assert report.baseline_compiled_tokens_per_s > 0
