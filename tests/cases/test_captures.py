"""Rows of catalogues about CUDA graphs and several GPUs, on every kernel of every op.

On a CPU a capture is only pretended, which shows what is refused in one and that a test can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends import examples
from torch_ops import CaptureError, kernels, policy
from torch_ops.attention import Attention, PreparedAttention
from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing import Spec, build, proof_of
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.registered import registered
from torch_ops.testing.subject import Subject, subject_of

from .captures import Outputs, capture, pretend, refill
from .kernels import backends_of, judge, same

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def cells(*places: str, cpu: tuple[str, ...], mark: pytest.MarkDecorator) -> list[Any]:
    """Give (op, backend, places): some backends on the CPU, and all on GPUs."""
    made = []
    for op in catalogue():
        made += [
            pytest.param(op, backend, ("cpu",) * len(places), id=f"{op}-{backend}-cpu")
            for backend in cpu
            if backend in backends_of(op)
        ]
        made += [
            pytest.param(
                op, backend, places, id=f"{op}-{backend}-gpu", marks=[pytest.mark.gpu, mark]
            )
            for backend in backends_of(op)
        ]
    return made


pytestmark = [
    pytest.mark.timeout(900),  # FlashInfer may compile
    pytest.mark.usefixtures("one_thread"),
]


def example(op: str, dtype: str = "bfloat16") -> Spec:
    """A small call of contiguous tensors, of sizes that every kernel takes."""
    spec = min(
        (
            spec
            for spec in examples.specs(op, dtype)
            if all(
                (o.layout == "contig" or name == "b") and o.regime != "zeros"
                for name, o in spec.operands
            )
            and spec.dim.get("hidden", 8) % 8 == 0
            and ("keys" not in spec.dim or _is_plain(spec))
        ),
        key=lambda spec: abs(sum(size for _, size in spec.dims) - 300),
    )
    several = {name: 5 if name == "tokens" else size for name, size in spec.dims}
    return spec.replace(dims=tuple(several.items()))


def _is_plain(attention: Spec) -> bool:
    dims = attention.dim
    seen = attention.param["window_left"] == -1 and dims["queries"] <= dims["keys"]
    return seen and dims["head_dim"] == 128


def taken(subject: Subject, op: str, device: torch.device) -> Spec:
    """An example that the kernel takes; skips where it takes none."""
    reasons = []
    for dtype in ("bfloat16", "float32"):
        spec = example(op, dtype)
        reason = subject.refuses(tuple(build(spec, device).values()))
        if reason is None:
            return spec
        reasons.append(reason)
    pytest.skip("refused: " + "; ".join(reasons))


def run(subject: Subject, op: str, args: dict[str, Any]) -> Outputs:
    result = subject.call(*args.values())
    mutated = proof_of(op).mutates
    if mutated:
        return tuple(args[name] for name in mutated)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def tensors(args: dict[str, Any]) -> list[Tensor]:
    return [value for value in args.values() if isinstance(value, Tensor)]


def replays(subject: Subject, op: str, device: torch.device) -> None:
    """Capture one call, give its arguments other values, and replay."""
    spec = taken(subject, op, device)
    given = build(spec, device)
    run(subject, op, build(spec, device))  # prepares it
    captured = capture(device, lambda: run(subject, op, given))
    if isinstance(captured, CaptureError):
        pytest.skip(f"refused: {captured}")
    assert isinstance(captured, tuple), captured
    found, replay = captured
    for seed in (7, 8):
        other = spec.replace(seed=seed)
        refill(tensors(given), tensors(build(other, device)))
        replay()
        wanted = run(subject, op, build(other, device))
        judge(op, tuple(build(other).values()), found)
        same("replay against eager", found, wanted)


@pytest.mark.parametrize(("op", "backend", "places"), cells("cuda", cpu=("torch",), mark=needs_gpu))
def test_case_31_a_replay_reads_what_is_there(
    op: str, backend: str, places: tuple[str, ...]
) -> None:
    replays(registered(op, backend), op, torch.device(places[0]))


def _stale(op: str) -> Callable[..., Any]:
    """A kernel that reads copies of what it was first given for a shape."""
    first: list[Any] = []

    def stale(*args: Any) -> Any:
        if not first:
            first.extend(a.clone() if isinstance(a, Tensor) else a for a in args)
        return catalogue()[op].reference(*first)

    return stale


@pytest.mark.parametrize("op", ["rms_norm", "apply_rope", "attention"])
def test_case_31_finds_a_replay_of_old_buffers(op: str) -> None:
    with pytest.raises(ViolationError):
        replays(subject_of(_stale(op)), op, CPU)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel is loaded."""
    monkeypatch.setattr(kernels, "_kernels", {})
    policy.invalidate()
    yield
    monkeypatch.undo()
    policy.invalidate()


@pytest.mark.parametrize(
    ("op", "backend", "places"), cells("cuda", cpu=("torch", "inductor"), mark=needs_gpu)
)
def test_case_22_a_cold_backend_is_refused_in_a_capture(
    op: str, backend: str, places: tuple[str, ...], cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, subject = torch.device(places[0]), registered(op, backend)
    given = build(taken(subject, op, device), device)
    kernels._kernels.clear()  # being asked loads it
    policy.invalidate()
    seen = pretend(device, monkeypatch, lambda: run(subject, op, given))
    assert isinstance(seen, CaptureError), seen
    assert "prepare first" in str(seen)
    assert registry.find(op, backend) not in kernels._kernels


@pytest.mark.parametrize(
    ("op", "backend", "places"), cells("cuda", cpu=("torch", "inductor"), mark=needs_gpu)
)
def test_case_22_a_cold_class_of_calls_is_refused_or_right(
    op: str, backend: str, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is loaded, but has compiled nothing for a dtype that few tests use."""
    device, subject = torch.device(places[0]), registered(op, backend)
    wide = "float64" if torch.float64 in catalogue()[op].dtypes else "float32"
    first, second = (example(op, wide).replace(seed=seed) for seed in (11, 12))
    given, other = build(first, device), build(second, device)
    reason = subject.refuses(tuple(given.values()))
    if reason is not None:
        pytest.skip(f"refused: {reason}")
    if device.type == "cuda":
        run(subject, op, build(taken(subject, op, device), device))
    monkeypatch.setattr(examples.part("inductor", "_compiled"), "_functions", {})
    seen = pretend(device, monkeypatch, lambda: run(subject, op, given))
    if isinstance(seen, Exception):
        assert isinstance(seen, CaptureError), seen
        assert "prepare first" in str(seen)
        return
    assert backend != "inductor", "it compiled while a stream was capturing"
    found, replay = seen
    refill(tensors(given), tensors(other))
    replay()
    judge(op, tuple(build(second).values()), found)


LAYERS = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.parametrize("place", LAYERS)
def test_case_31_a_layer_that_is_not_safe_in_graphs_is_refused_there(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, layer = torch.device(place), Attention(4, 64, 2)
    q, k = (torch.randn(1, 5, n, 64, device=device, dtype=torch.float16) for n in (4, 2))
    monkeypatch.setattr(PreparedAttention, "graph_safe", False)
    wanted = layer(q, k, k)
    seen = pretend(device, monkeypatch, lambda: (layer(q, k, k),))
    assert isinstance(seen, CaptureError), seen
    assert "its graph_safe is False" in str(seen)
    same("outside of the capture", layer(q, k, k), wanted)
    monkeypatch.setattr(PreparedAttention, "graph_safe", True)
    fresh = Attention(4, 64, 2)
    fresh(q, k, k)
    assert isinstance(pretend(device, monkeypatch, lambda: (fresh(q, k, k),)), tuple)


@pytest.mark.gpu
@needs_gpu
def test_case_22_a_layer_is_not_prepared_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device, layer = torch.device("cuda"), Attention(4, 64, 2)
    q, k = (torch.randn(1, 5, n, 64, device=device, dtype=torch.float16) for n in (4, 2))
    seen = pretend(device, monkeypatch, lambda: (layer(q, k, k),))
    assert isinstance(seen, CaptureError), seen
    assert "prepare first" in str(seen)
    wanted = layer(q, k, k)
    captured = pretend(device, monkeypatch, lambda: (layer(q, k, k),))
    assert isinstance(captured, tuple), captured
    captured[1]()
    same("replay", captured[0], wanted)


def follows(subject: Subject, op: str, places: tuple[str, ...]) -> None:
    """Run on one device, then on another one that isn't the current one."""
    spec = taken(subject, op, torch.device(places[0]))
    for seed, place in enumerate((*places, *places)):
        other = spec.replace(seed=seed)
        found = run(subject, op, build(other, place))
        assert all(out.device == torch.device(place) for out in found)
        judge(op, tuple(build(other).values()), found)
        if place != "cpu":
            assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("op", "backend", "places"), cells("cuda:0", "cuda:1", cpu=("torch",), mark=needs_two)
)
def test_case_29_tensors_are_not_on_the_current_device(
    op: str, backend: str, places: tuple[str, ...]
) -> None:
    follows(registered(op, backend), op, places)


def _of_the_first_call(op: str) -> Callable[..., Any]:
    """A kernel whose results are kept under no device."""
    kept: list[Any] = []

    def forgetful(*args: Any) -> Any:
        if not kept:
            kept.append(catalogue()[op].reference(*args))
        return kept[0]

    return forgetful


@pytest.mark.parametrize("op", ["rms_norm", "attention"])
def test_case_29_finds_what_is_kept_of_another_device(op: str) -> None:
    with pytest.raises(ViolationError):
        follows(subject_of(_of_the_first_call(op)), op, ("cpu", "cpu"))
