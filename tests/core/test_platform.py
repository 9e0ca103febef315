"""`Platform` and `Requirement`: frozen values; selection needs no GPU to be tested for one."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from torch_ops import Platform, Requirement
from torch_ops.platform import forget_probes, platform_of, rejection

CPU = Platform.cpu()
H200 = Platform.cuda((9, 0))
MI300 = Platform.rocm("gfx942")
UNKNOWN = Platform("cuda", None, 0, "?")


@pytest.mark.parametrize(
    ("platform", "device", "arch", "index"),
    [
        (CPU, "cpu", None, None),
        (H200, "cuda", "sm_90", 0),
        (Platform.cuda((12, 1), index=3), "cuda", "sm_121", 3),
        (MI300, "rocm", "gfx942", 0),
        (Platform.rocm("gfx942:sramecc+:xnack-", 1), "rocm", "gfx942", 1),
    ],
    ids=str,
)
def test_values(platform: Platform, device: str, arch: str | None, index: int | None) -> None:
    assert (platform.device, platform.arch, platform.index) == (device, arch, index)
    assert platform.name
    assert pickle.loads(pickle.dumps(platform)) == platform
    assert hash(platform) == hash(dataclasses.replace(platform))
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.device = "cpu"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arch", "capability"),
    [
        ("sm_90", (9, 0)),
        ("sm_90a", (9, 0)),
        ("sm_100", (10, 0)),
        ("sm_121", (12, 1)),
        ("sm_", None),
        ("sm_9", None),
        ("other", None),
        (None, None),
    ],
)
def test_capability(arch: str | None, capability: tuple[int, int] | None) -> None:
    assert Platform("cuda", arch, 0, "").capability == capability


def test_gfx_names_are_told_apart() -> None:
    assert Platform.rocm("gfx1030") != Platform.rocm("gfx1032")
    only = Requirement.rocm(["gfx1030"])
    assert only.rejects(Platform.rocm("gfx1030")) is None
    assert only.rejects(Platform.rocm("gfx1032")) == "arch gfx1032 (supported: gfx1030)"


def test_unknown_device_does_not_construct() -> None:
    with pytest.raises(ValueError, match=r"device 'xpu' is not known \(accepted: 'cpu', 'cuda'"):
        Platform("xpu")
    with pytest.raises(ValueError, match=r"Requirement: device 'xpu' is not known"):
        Requirement("xpu")


def test_detect_the_cpu() -> None:
    assert Platform.detect("cpu") == Platform.detect(torch.device("cpu")) == CPU
    assert platform_of([1, None, torch.ones(1)]) == CPU
    assert platform_of([1, None]) is None


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_detect_refuses_other_devices(device: str) -> None:
    with pytest.raises(ValueError, match=rf"Platform.detect: device '{device}' is not supported"):
        Platform.detect(device)


class Gpus:
    """Stands in for ``torch.cuda`` with some devices, and counts the probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *properties: SimpleNamespace) -> None:
        self.probes = 0
        self._properties = properties
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._probe)
        forget_probes()

    def _probe(self, index: int) -> SimpleNamespace:
        self.probes += 1
        return self._properties[index]


@pytest.fixture(autouse=True)
def probed_anew() -> object:
    yield
    forget_probes()


def test_detect_probes_once_per_index(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(
        monkeypatch,
        SimpleNamespace(major=9, minor=0, name="NVIDIA H200"),
        SimpleNamespace(major=8, minor=6, name="NVIDIA A10"),
    )
    for _ in range(3):
        assert Platform.detect("cuda:0") == Platform("cuda", "sm_90", 0, "NVIDIA H200")
        assert Platform.detect("cuda:1") == Platform("cuda", "sm_86", 1, "NVIDIA A10")
    assert Platform.detect("cuda") == Platform.detect() == Platform.detect("cuda:1")
    assert gpus.probes == 2
    forget_probes()
    Platform.detect("cuda:0")
    assert gpus.probes == 3


def test_detect_tells_rocm_from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm tensors have device type "cuda", and its major and minor mean something else."""
    Gpus(
        monkeypatch,
        SimpleNamespace(major=9, minor=4, name="AMD MI300X", gcnArchName="gfx942:sramecc+:xnack-"),
        SimpleNamespace(major=9, minor=4, name="AMD ?", gcnArchName=""),
    )
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    found = Platform.detect("cuda:0")
    assert found == Platform("rocm", "gfx942", 0, "AMD MI300X")
    assert Requirement.cuda().rejects(found) == "CUDA only (device is 'rocm')"
    assert Requirement.cuda((8, 0)).rejects(found) == "CUDA only (device is 'rocm')"
    assert Platform.detect("cuda:1").arch is None


@pytest.mark.parametrize(
    ("requirement", "platform", "reason"),
    [
        (Requirement.cpu(), CPU, None),
        (Requirement.cpu(), H200, "CPU only (device is 'cuda')"),
        (Requirement.cuda(), H200, None),
        (Requirement.cuda(), CPU, "CUDA only (device is 'cpu')"),
        (Requirement.rocm(), H200, "ROCm only (device is 'cuda')"),
        (Requirement.rocm(), MI300, None),
        (Requirement.cuda((9, 0)), H200, None),
        (
            Requirement.cuda((9, 0)),
            Platform.cuda((8, 9)),
            "arch sm_89 is too old (supported: sm_90 and newer)",
        ),
        (
            Requirement.cuda((8, 0), (9, 0)),
            Platform.cuda((10, 0)),
            "arch sm_100 is too new (supported: sm_80 to sm_90)",
        ),
        (
            Requirement.cuda(max_arch=(9, 0)),
            Platform.cuda((12, 0)),
            "arch sm_120 is too new (supported: up to sm_90)",
        ),
        (Requirement.cuda((9, 0)), Platform.cuda((10, 0)), None),
        (
            Requirement.cuda((9, 0)),
            UNKNOWN,
            "arch unknown can't be compared (supported: sm_90 and newer)",
        ),
        (Requirement.rocm(["gfx942", "gfx950"]), MI300, None),
        (
            Requirement.rocm(["gfx950"]),
            MI300,
            "arch gfx942 (supported: gfx950)",
        ),
        (
            Requirement.rocm(["gfx950"]),
            Platform("rocm", None, 0, "?"),
            "arch unknown (supported: gfx950)",
        ),
    ],
    ids=str,
)
def test_rejects(requirement: Requirement, platform: Platform, reason: str | None) -> None:
    assert requirement.rejects(platform) == reason


def test_requirement_is_a_value() -> None:
    assert Requirement.rocm(["gfx942"]) == Requirement.rocm(("gfx942",))
    assert len({Requirement.cuda((9, 0)), Requirement.cuda((9, 0))}) == 1
    assert pickle.loads(pickle.dumps(Requirement.cuda((9, 0)))) == Requirement.cuda((9, 0))


def test_one_name_instead_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"archs must be a sequence of names, received 'gfx942'"):
        Requirement.rocm("gfx942")


def test_a_set_of_requirements_means_any() -> None:
    either = frozenset({Requirement.cuda((9, 0)), Requirement.rocm(["gfx942"])})
    assert rejection(either, H200) is None
    assert rejection(either, MI300) is None
    assert rejection(frozenset(), CPU) is None
    assert rejection(either, CPU) == "CUDA or ROCm only (device is 'cpu')"
