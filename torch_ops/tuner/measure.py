"""All kernels that may serve a call: those that are right, and how long each takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops import selector, tuning
from torch_ops.declarations import catalogue
from torch_ops.platform import Platform
from torch_ops.registry import registry
from torch_ops.testing import subject
from torch_ops.testing.arguments import build
from torch_ops.testing.canaries import probe
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.parts import Expected, check, expected_of
from torch_ops.testing.proof import Arguments, Proof, proof_of
from torch_ops.testing.spec import Spec

__all__ = ["eligible", "measure"]

Timer = Callable[[Callable[[], Any], torch.device], float]
TURNS = 2  # of which the faster counts, forwards and backwards
_LONGEST = 200  # characters of a reason


def eligible(op: str, args: Sequence[Any], platform: Platform) -> list[str]:
    """List the backends of the declared order that take a call."""
    specs = {spec.backend.value: spec for spec in registry.get(op)}
    order = [name for name in selector.order_of(op, platform) or () if name in specs]
    return [name for name in order if selector.judge(specs[name], platform, args).usable]


def measure(spec: Spec, bucket: str, device: torch.device, timer: Timer) -> tuning.Row:
    """Judge and time every kernel on the same arguments.

    One that raises, or whose outputs aren't within the op's bound, gets no time but a reason.

    Raises:
        DeviceLostError: a kernel left the GPU unusable.
        OutOfMemoryError: arguments, or what the oracle makes of them, don't fit.
    """
    proof, args = proof_of(spec.op), build(spec, device)
    with torch.no_grad():
        names = eligible(spec.op, tuple(args.values()), Platform.detect(device))
        expected = expected_of(proof, args)
        rejected = {name: _fault(proof, name, args, expected) for name in names}
        del expected
        calls = {name: _call(spec.op, name, args) for name, why in rejected.items() if not why}
        times: dict[str, float] = {}
        for turn in range(TURNS):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                try:
                    found = timer(calls[name], device)
                except Exception as error:  # a kernel's, of whatever class: its reason is kept
                    probe(device, subject.first_line(error))
                    rejected[name] = _short(f"while timing: {subject.first_line(error)}")
                    del calls[name]
                    times.pop(name, None)
                else:
                    times[name] = min(found, times.get(name, found))
    ranked = dict(sorted(times.items(), key=lambda item: item[1]))
    return tuning.Row(bucket, ranked, {name: why for name, why in rejected.items() if why})


def _fault(proof: Proof, name: str, args: Arguments, expected: Sequence[Expected]) -> str:
    """Run a kernel once, which also compiles it; says what is wrong with it, or nothing."""
    own = _copied(args)
    call = functools.partial(getattr(torch_ops.ops, proof.op), backend=name)
    try:
        outputs = subject.call(subject.subject_of(call, name), proof, own)
        check(proof.op, args, outputs, expected)
    except ViolationError as broken:
        return _short(broken.detail)
    return ""


def _call(op: str, name: str, args: Arguments) -> Callable[[], Any]:
    own = _copied(args) if catalogue()[op].mutates else args
    return functools.partial(getattr(torch_ops.ops, op), *own.values(), backend=name)


def _copied(args: Arguments) -> Arguments:
    return {n: a.clone() if isinstance(a, Tensor) else a for n, a in args.items()}


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
