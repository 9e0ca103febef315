"""What several tests of attention need: inputs, an exact oracle, which kernel ran, plugins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torch_ops.attention import Attention, AttentionBackend, AttentionSpec

SDPA = "aten::_scaled_dot_product"


def inputs(
    layer: Attention,
    batch: int = 2,
    queries: int = 3,
    keys: int = 5,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal queries, keys and values that fit a layer."""
    generator = torch.Generator().manual_seed(seed)
    spec = layer.spec
    shapes = (
        (batch, queries, spec.num_heads, spec.head_dim),
        (batch, keys, spec.num_kv_heads, spec.head_dim),
        (batch, keys, spec.num_kv_heads, spec.head_dim),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def oracle(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The exact result in float64, and how far from it a correct kernel may be.

    ``|o| u + A (u_P + 2 e_s + 8 a + 2 sqrt(S) a) + eta`` with ``A = sum p |v|`` and
    ``e_s = a ((sqrt(D) + 2) G + 4 cap)``, G the largest ``scale sum |q k|``, a the unit of the
    accumulation; P may be stored in the input's dtype. For float64 inputs the oracle rounds as
    well as the kernel, so every unit counts twice.
    """
    info = torch.finfo(q.dtype)
    twice = 2.0 if q.dtype == torch.float64 else 1.0
    u, eta = twice * info.eps / 2, twice * info.smallest_normal * info.eps / 2
    acc = twice * min(info.eps, torch.finfo(torch.float32).eps) / 2
    queries, keys, group = q.shape[1], k.shape[1], spec.num_heads // spec.num_kv_heads
    wide_q = q.cpu().double().transpose(1, 2)
    wide_k, wide_v = (x.cpu().double().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    logits = spec.scale * wide_q @ wide_k.mT
    size = abs(spec.scale) * wide_q.abs() @ wide_k.abs().mT
    if spec.logits_soft_cap:
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    place = torch.arange(queries).unsqueeze(1) + keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if spec.is_causal:
        seen &= torch.arange(keys) <= place
    if spec.window_left >= 0:
        seen &= torch.arange(keys) >= place - spec.window_left
    p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    out, weight = p @ wide_v, p @ wide_v.abs()
    e = acc * ((spec.head_dim**0.5 + 2) * (size * seen).amax(-1, True) + 4 * spec.logits_soft_cap)
    bound = out.abs() * u + weight * (u + 2 * e + (8 + 2 * keys**0.5) * acc) + eta
    bound = bound.masked_fill(~seen.any(-1, True), 0.0)  # a row without keys is exactly zero
    return out.transpose(1, 2), bound.transpose(1, 2)


def worst(actual: Tensor, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Largest error of a result as a part of its bound; infinite where it isn't finite."""
    exact, bound = oracle(spec, q, k, v)
    error = (actual.cpu().double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(torch.inf)
    return float(ratio.max()) if ratio.numel() else 0.0


def kernels(call: Callable[[], object]) -> set[str]:
    """Names of all operators and regions that PyTorch's profiler sees in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return {event.key for event in profiler.key_averages()}


def sdpa(call: Callable[[], object]) -> set[str]:
    """Which of PyTorch's attention kernels a call ran."""
    return {name for name in kernels(call) if name.startswith(SDPA)}


class Stack(nn.Module):
    """Attention layers whose outputs are all seen in the result, each in a slice of its own."""

    def __init__(self, *layers: Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([layer(q, k, v) for layer in self.layers])


def stack(count: int, **options: object) -> Stack:
    """A stack of alike layers; layer i has scale i + 1, by which a script knows it."""
    return Stack(
        *(
            Attention(4, 8, 2, scale=float(index + 1), **options)  # type: ignore[arg-type]
            for index in range(count)
        )
    )


def layers(model: nn.Module) -> list[Attention]:
    """The attention layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def backends(model: nn.Module) -> list[str]:
    """What each layer of a model says that it runs, in order."""
    return [layer.backend.value for layer in layers(model)]


_numbers = itertools.count()


def distribution(
    site: Path,
    name: str,
    files: Mapping[str, str],
    *,
    package: str | None = None,
    dist: str | None = None,
) -> str:
    """Install a backend ``name`` as pip would: a package with these files, metadata, entry point.

    Returns:
        ``"distribution version"``, as error messages name it.
    """
    package = package or f"torch_ops_{name}"
    dist, version = dist or f"torch-ops-{name}", f"1.{next(_numbers)}"
    (site / package).mkdir(parents=True)
    for file, text in files.items():
        (site / package / file).write_text(text)
    info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[torch_ops.backends]\n{name} = {package}\n")
    return f"{dist} {version}"


def forget_members(known: set[str]) -> None:
    """Take members of uninstalled plugins out of the enum again."""
    for value in set(AttentionBackend._members) - known:
        member: AttentionBackend = AttentionBackend._members.pop(value)
        if getattr(AttentionBackend, member.name, None) is member:
            delattr(AttentionBackend, member.name)
