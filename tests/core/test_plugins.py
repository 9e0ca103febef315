"""Backends from other distributions: found, chosen, refused, broken, crooked and clashing."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torch_ops
from torch_ops import (
    Backend,
    BackendUnavailableError,
    DeclarationError,
    NoBackendError,
    Platform,
    PluginConflictError,
    UnknownBackendError,
    discovery,
    ops,
)
from torch_ops.testing.registered import registered

from . import plugins
from .conftest import Install, Python

CPU = Platform.cpu()


def aten_names(call: object) -> set[str]:
    """Names of what ran, as the profiler saw it."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert callable(call)
        call()
    return {event.key for event in seen.key_averages()}


def test_written_metadata_is_what_pip_writes(tmp_path: Path) -> None:
    """The other tests install by hand; that gives what an installation gives."""
    by_hand, by_pip = tmp_path / "hand", tmp_path / "pip"
    plugins.install("acme", by_hand)
    source = tmp_path / "source"
    plugins.copy_source("acme", source)
    command = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--target", str(by_pip), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def seen(site: Path) -> list[tuple[str, str, str, str]]:
        return [
            (dist.name, dist.version, entry.name, entry.value)
            for dist in importlib.metadata.distributions(path=[str(site)])
            for entry in dist.entry_points.select(group=plugins.GROUP)
        ]

    assert seen(by_hand) == seen(by_pip) == [("torch-ops-acme", "1.2.0", "acme", "torch_ops_acme")]
    files = {
        site: sorted(path.name for path in (site / "torch_ops_acme").glob("*.py"))
        for site in (by_hand, by_pip)
    }
    assert files[by_hand] == files[by_pip]


def test_found(install: Install) -> None:
    with pytest.raises(UnknownBackendError, match="No 'acme' backend registered for op 'rms_norm'"):
        torch_ops.select_kernel("rms_norm", "acme")
    labels = install("acme")
    acme = Backend("acme")
    assert acme in tuple(Backend)
    assert acme in ops.rms_norm.backends()
    assert acme in ops.silu_and_mul.backends()
    assert acme not in ops.layer_norm.backends()
    spec = torch_ops.select_kernel("rms_norm", acme)
    assert spec.target == "torch_ops_acme.rms_norm:rms_norm"
    assert torch_ops.registry.site(spec) == labels["acme"] == "torch-ops-acme 1.2.0"


def test_found_without_importing_a_kernel(install: Install) -> None:
    install("acme")
    (candidate,) = [c for c in torch_ops.explain("rms_norm").candidates if c.backend == "acme"]
    assert candidate.usable
    assert candidate.state == "found"
    assert "torch_ops_acme" in sys.modules
    assert "torch_ops_acme.rms_norm" not in sys.modules


def test_never_chosen_silently(install: Install) -> None:
    install("acme")
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch_ops.select_kernel("rms_norm", platform=CPU).backend is Backend.TORCH
    with torch_ops.trace() as seen:
        ops.rms_norm(x, weight)
    assert [record.backend for record in seen.records] == [Backend.TORCH]


def test_never_chosen_silently_even_as_the_only_usable(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    monkeypatch.setenv("TORCH_OPS_DISABLE", "torch,inductor")
    torch_ops.refresh()
    with pytest.raises(NoBackendError) as raised:
        ops.silu_and_mul(torch.randn(3, 8))
    message = str(raised.value)
    assert "op 'silu_and_mul' has no backend usable on device 'cpu'" in message
    assert "acme  not in the declared order of 'silu_and_mul' on cpu" in message
    assert "backend='acme'" in message
    assert "torch  disabled by TORCH_OPS_DISABLE=torch" in message
    assert "inductor  disabled by TORCH_OPS_DISABLE=inductor" in message
    assert {c.backend.value for c in raised.value.candidates} >= {"torch", "inductor", "acme"}


@pytest.mark.parametrize("source", ["call", "overload", "scope", "process", "environment"])
def test_chosen(source: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it, its kernel runs: the profiler sees what only this one calls."""
    install("acme")
    x = torch.randn(3, 8)

    def plain() -> torch.Tensor:
        result: torch.Tensor = torch.ops.torch_ops.silu_and_mul(x)
        return result

    def called() -> torch.Tensor:
        if source == "call":
            result: torch.Tensor = ops.silu_and_mul(x, backend="acme")
            return result
        if source == "overload":
            result = torch.ops.torch_ops.silu_and_mul.backend(x, "acme")
            return result
        if source == "scope":
            with torch_ops.use_backend("acme"):
                return plain()
        return plain()

    if source == "process":
        torch_ops.set_backend(silu_and_mul="acme")
    if source == "environment":
        monkeypatch.setenv("TORCH_OPS_BACKEND", "silu_and_mul=acme")
        torch_ops.refresh()
    called()
    names = aten_names(called)
    assert "aten::sigmoid" in names
    assert "aten::silu" not in names
    torch.testing.assert_close(called(), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("source", ["call", "scope"])
def test_refused_by_its_predicate(source: str, install: Install) -> None:
    """Strict: a legal call that the chosen backend can't serve raises and names what it takes."""
    install("acme")
    x = torch.randn(3, 8, dtype=torch.float16)
    weight = torch.randn(8)
    scope = torch_ops.use_backend("acme" if source == "scope" else None)
    backend = "acme" if source == "call" else None
    with scope, pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(x, weight, backend=backend)
    reason = "weight dtype torch.float32 (supported: torch.float16, that of x); convert the weight"
    assert raised.value.reasons == (reason,)
    message = str(raised.value)
    assert f"op 'rms_norm': backend 'acme', chosen by {source}, is not usable here" in message
    assert f"acme  {reason}" in message
    assert "x=float16[3, 8]@cpu, weight=float32[8]@cpu, eps=1e-06" in message
    with pytest.raises(BackendUnavailableError, match="weight is None"):
        ops.rms_norm(x, backend="acme")
    assert ops.rms_norm(x, weight.half(), backend="acme").dtype == torch.float16


def test_its_predicate_gets_every_argument(install: Install) -> None:
    """The dispatcher drops trailing arguments that equal their defaults; acme has no defaults."""
    install("acme")
    with pytest.raises(BackendUnavailableError, match="weight is None"):
        torch.ops.torch_ops.rms_norm.backend(torch.randn(3, 8), None, 1e-6, "acme")
    with torch_ops.use_backend("acme"), pytest.raises(BackendUnavailableError, match="is None"):
        torch.ops.torch_ops.rms_norm(torch.randn(3, 8))
    explained = torch_ops.explain("rms_norm", torch.randn(3, 8), backend="acme")
    assert explained.chosen is None
    assert isinstance(explained.error, BackendUnavailableError)


def test_unavailable_says_why_and_is_never_imported(install: Install) -> None:
    install("absent")
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.select_kernel("rms_norm", "absent", platform=CPU)
    assert raised.value.reasons == (
        "CUDA or ROCm only (device is 'cpu')",
        "absent driver 1.0 (needed: 2.0 or newer); update the driver",
    )
    assert "absent  absent driver 1.0" in str(raised.value)
    with pytest.raises(BackendUnavailableError):
        ops.rms_norm(torch.randn(3, 8), backend="absent")
    spec = torch_ops.select_kernel("rms_norm", "absent", platform=CPU, unchecked=True)
    assert spec.backend == "absent"
    assert "torch_ops_absent.rms_norm" not in sys.modules


@pytest.mark.parametrize(
    ("platform", "reasons"),
    [
        (Platform.cuda((9, 0)), ("absent driver 1.0 (needed: 2.0 or newer); update the driver",)),
        (
            Platform.cuda((8, 0)),
            (
                "ROCm only (device is 'cuda'); arch sm_80 is too old (supported: sm_90 and newer)",
                "absent driver 1.0 (needed: 2.0 or newer); update the driver",
            ),
        ),
    ],
    ids=str,
)
def test_reasons_depend_on_the_platform(
    platform: Platform, reasons: tuple[str, ...], install: Install
) -> None:
    install("absent")
    (candidate,) = [
        c
        for c in torch_ops.explain("rms_norm", platform=platform).candidates
        if c.backend == "absent"
    ]
    assert {part for r in candidate.reasons for part in r.split("; ")} >= {
        part for r in reasons for part in r.split("; ")
    }


def test_broken_package_breaks_nothing_else(install: Install) -> None:
    install("broken", "acme")
    x = torch.randn(3, 8)
    assert ops.silu_and_mul(x, backend="acme").shape == (3, 4)
    assert ops.rms_norm(x).shape == (3, 8)
    reason = (
        "importing torch_ops_broken failed: ImportError: libbroken.so.7: cannot open shared "
        "object file"
    )
    with pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(x, backend="broken")
    assert raised.value.reasons == (reason,)
    assert reason in str(raised.value)
    explained = torch_ops.explain("rms_norm", x)
    (candidate,) = [c for c in explained.candidates if c.backend == "broken"]
    assert not candidate.usable
    assert candidate.reasons[0] == reason
    assert candidate.state == "failed"
    subject = registered("rms_norm", "broken")  # a proof tells it, too
    assert (subject.untestable(x.dtype), subject.refuses((x, None, 1e-6))) == (None, reason)
    with pytest.raises(UnknownBackendError, match="No 'broken' backend registered for op 'lay"):
        ops.layer_norm(x, backend="broken")


def decline(monkeypatch: pytest.MonkeyPatch, stated: object) -> None:
    package = importlib.import_module("torch_ops_acme")
    monkeypatch.setattr(package, "declined", stated, raising=False)
    torch_ops.refresh()


def test_what_a_package_declines_says_why(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    decline(monkeypatch, {"layer_norm": "rows are never centered"})
    with pytest.raises(UnknownBackendError) as raised:
        ops.layer_norm(torch.randn(3, 8), backend="acme")
    wanted = "No 'acme' backend registered for op 'layer_norm': rows are never centered. Registered"
    assert str(raised.value.args[0]).startswith(wanted)
    with pytest.raises(UnknownBackendError, match=r"for op 'gelu_and_mul'\. Registered"):
        ops.gelu_and_mul(torch.randn(3, 8), backend="acme")
    assert ops.silu_and_mul(torch.randn(3, 8), backend="acme").shape == (3, 4)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (["layer_norm"], "TypeError: declined must map names of ops to reasons, received ['la"),
        ({"layer_norm": ""}, "TypeError: declined must map names of ops to reasons, received {"),
        ({"rms_norm": "no"}, "ValueError: declined names 'rms_norm', which is a module of the p"),
    ],
    ids=str,
)
def test_what_can_t_be_declined_so_makes_the_package_unusable(
    stated: object, message: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    decline(monkeypatch, stated)
    with pytest.raises(BackendUnavailableError) as raised:
        ops.rms_norm(torch.randn(3, 8), backend="acme")
    assert any(message in reason for reason in raised.value.reasons)


def test_broken_package_is_in_every_list_of_reasons(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("broken")
    monkeypatch.setenv("TORCH_OPS_DISABLE", "torch,inductor")
    torch_ops.refresh()
    with pytest.raises(NoBackendError, match=r"broken  importing torch_ops_broken failed: Import"):
        ops.rms_norm(torch.randn(3, 8))


def test_broken_package_of_a_fresh_process(python: Python) -> None:
    """``import torch_ops`` and everything that needn't the broken one work."""
    out = python(
        """
        import torch, torch_ops
        print(torch_ops.ops.rms_norm(torch.ones(2, 4)).sum().item())
        print([b.value for b in torch_ops.Backend][-1])
        print(torch_ops.explain("rms_norm").chosen)
        """,
        "broken",
    )
    assert out.split("\n")[0].startswith("7.99")
    assert out.split("\n")[1:3] == ["broken", "torch"]


def test_broken_module(install: Install) -> None:
    """A kernel whose import fails: type and text in the reason, at every later call, too."""
    install("crooked")
    x, weight = torch.randn(3, 8), torch.randn(8)
    reason = "loading it failed: OSError: crooked was built for another driver (12.8, found 11.4)"
    for _ in range(3):
        with pytest.raises(BackendUnavailableError) as raised:
            ops.gemma_rms_norm(x, weight, backend="crooked")
        assert raised.value.reasons == (reason,)
    with pytest.raises(BackendUnavailableError, match="another driver"):
        torch_ops.get_kernel("gemma_rms_norm", "crooked")
    (candidate,) = [
        c for c in torch_ops.explain("gemma_rms_norm").candidates if c.backend == "crooked"
    ]
    assert (candidate.usable, candidate.state) == (False, "failed")
    assert reason in candidate.reasons
    assert ops.gemma_rms_norm(x, weight).shape == x.shape
    with pytest.raises(BackendUnavailableError, match="AttributeError: module 'torch_ops_crooked"):
        ops.merge_state(
            torch.ones(2, 1, 4),
            torch.ones(2, 1),
            torch.ones(2, 1, 4),
            torch.ones(2, 1),
            backend="crooked",
        )


def test_failure_is_forgotten_by_refresh(install: Install) -> None:
    install("crooked")
    with pytest.raises(BackendUnavailableError):
        torch_ops.get_kernel("gemma_rms_norm", "crooked")
    origin = Path(sys.modules["torch_ops_crooked"].__path__[0]) / "gemma_rms_norm.py"
    fixed = "def gemma_rms_norm(x, weight, eps=1e-6):\n    return x.clone()\n"
    origin.write_text(fixed)
    with pytest.raises(BackendUnavailableError):
        torch_ops.get_kernel("gemma_rms_norm", "crooked")
    torch_ops.refresh()
    assert torch_ops.get_kernel("gemma_rms_norm", "crooked")(1 * torch.ones(2, 2), None).sum() == 4


@pytest.mark.parametrize(
    ("op", "declared", "received"),
    [
        ("rms_norm", "eps: 'float' = 1e-06", "kernel.*eps: 'float' = 1e-05"),
        ("layer_norm", "weight: .*, bias: ", "kernel.*bias: .*, weight: "),
        ("silu_and_mul", r"\(x: 'Tensor'\)", r"kernel\(x: 'Tensor \| None'\)"),
        ("gelu_and_mul", r"\(x: 'Tensor'\)", r"supports\(\)"),
        ("gelu_tanh_and_mul", "-> 'Tensor'", r"kernel.* -> 'tuple\[Tensor, Tensor\]'"),
    ],
    ids=["default", "order", "type", "predicate", "return"],
)
def test_another_signature(op: str, declared: str, received: str, install: Install) -> None:
    """Refused when the kernel is loaded, naming both signatures; again at every later call."""
    install("crooked")
    call = getattr(ops, op)
    pattern = rf"op '{op}', backend 'crooked'.*Declared: .*{declared}.*Received: .*{received}"
    for _ in range(2):
        with pytest.raises(DeclarationError, match=pattern):
            call(torch.randn(3, 8), backend="crooked")
    with pytest.raises(DeclarationError, match=pattern):
        torch_ops.get_kernel(op, "crooked")
    with pytest.raises(DeclarationError, match=rf"torch_ops_crooked.{op}\.py:\d+"):
        torch_ops.select_kernel(op, "crooked", args=(torch.randn(3, 8),))
    assert call(torch.randn(3, 8)) is not None


def test_clash(install: Install) -> None:
    """Two distributions under one name: an error when the name is used, and only then."""
    labels = install("acme", "rival")
    x = torch.randn(3, 8)
    assert ops.silu_and_mul(x).shape == (3, 4)
    for use in (
        lambda: ops.silu_and_mul(x, backend="acme"),
        lambda: torch.ops.torch_ops.silu_and_mul.backend(x, "acme"),
        lambda: torch_ops.select_kernel("silu_and_mul", "acme"),
        lambda: torch_ops.get_kernel("silu_and_mul", "acme"),
    ):
        with pytest.raises(PluginConflictError) as raised:
            use()
        assert raised.value.backend == "acme"
        assert raised.value.distributions == tuple(sorted(labels.values()))
        assert "torch-ops-acme 1.2.0, torch-ops-rival 0.3.1" in str(raised.value)
    with torch_ops.use_backend("acme"), pytest.raises(PluginConflictError):
        ops.silu_and_mul(x)
    found = discovery.packages()["acme"]
    assert found.distributions == tuple(sorted(labels.values()))
    assert "torch_ops_acme" not in sys.modules


def test_clash_is_in_the_reasons(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", "rival")
    (candidate,) = [c for c in torch_ops.explain("silu_and_mul").candidates if c.backend == "acme"]
    assert not candidate.usable
    assert "torch-ops-acme 1.2.0, torch-ops-rival 0.3.1" in candidate.reasons[0]
    monkeypatch.setenv("TORCH_OPS_DISABLE", "torch,inductor")
    torch_ops.refresh()
    with pytest.raises(NoBackendError, match=r"acme  .*torch-ops-acme 1\.2\.0, torch-ops-rival"):
        ops.silu_and_mul(torch.randn(3, 8))


def test_clash_with_a_built_in_name(install: Install, tmp_path: Path) -> None:
    """A foreign 'inductor' takes nothing over: it's refused, and the rest goes on."""
    site = tmp_path / "site"
    plugins.install("rival", site)
    entries = site / "torch_ops_rival-0.3.1.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace("acme =", "inductor ="))
    install()
    x = torch.randn(3, 8)
    assert torch_ops.explain("silu_and_mul", x).chosen is Backend.TORCH
    with pytest.raises(PluginConflictError, match=r"'inductor'.*torch-ops .*torch-ops-rival 0.3.1"):
        ops.silu_and_mul(x, backend="inductor")


def test_uninstalled(install: Install, tmp_path: Path) -> None:
    """After ``refresh`` nothing of a backend that is gone can be chosen."""
    install("acme")
    ops.silu_and_mul(torch.randn(3, 8), backend="acme")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    for file in info.iterdir():
        file.unlink()
    info.rmdir()
    torch_ops.refresh()
    assert "acme" not in [b.value for b in ops.silu_and_mul.backends()]
    with pytest.raises(UnknownBackendError, match="No 'acme' backend registered"):
        ops.silu_and_mul(torch.randn(3, 8), backend="acme")
