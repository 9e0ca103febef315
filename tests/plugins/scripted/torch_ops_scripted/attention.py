"""Kernels that fill their output with a number, and fail where the script wants them to.

A script knows a layer by its scale, the one number of a spec that nothing here needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.attention import AttentionBackend, AttentionSpec, PreparedAttention

VALUES = {"scripted_one": 1.0, "scripted_two": 2.0, "scripted_three": 3.0}


class Script:
    """What is to happen, and what has happened.

    Attributes:
        acts: By step (``"supports"``, ``"prepare"``, ``"run"``), family and the layer's scale what
            is called there; what ``supports`` and ``prepare`` get from it they return.
        counts: How often each step of each family was reached.
    """

    def __init__(self) -> None:
        self.acts: dict[tuple[str, str, float], Callable[[], object]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def reach(self, step: str, spec: AttentionSpec, member: AttentionBackend) -> object:
        self.counts[step, member.value] += 1
        act = self.acts.get((step, member.value, spec.scale))
        return act() if act is not None else None


script = Script()


class Filled(PreparedAttention):
    def __init__(self, spec: AttentionSpec, member: AttentionBackend) -> None:
        self.spec = spec
        self.backend = member
        self.workspace = torch.zeros(16)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        script.reach("run", self.spec, self.backend)
        return torch.full_like(q, VALUES[self.backend.value], memory_format=torch.contiguous_format)


def supports(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, member: AttentionBackend
) -> object:
    return script.reach("supports", spec, member)


def prepare(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, member: AttentionBackend
) -> object:
    return script.reach("prepare", spec, member) or Filled(spec, member)
