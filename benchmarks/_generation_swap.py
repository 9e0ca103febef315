"""A swap of attention in the middle of a text: what it takes, and what it changes."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import _measure
from benchmarks._generators import Paged
from torch_ops.attention import override_attention_backend
from torch_ops.demo.session import backends
from torch_ops.errors import AttentionOverrideError

__all__ = ["swapped"]

TARGETS = ("flashinfer_fa2", "triton", "torch_math")


class _Text(NamedTuple):
    """Greedy steps from one state: milliseconds, tokens and logits of each."""

    ms: list[float]
    tokens: list[Tensor]
    logits: list[Tensor]


def swapped(
    generator: Paged, last: Tensor, steps: int, target: str | None = None
) -> dict[str, Any]:
    """Generate four times from one state: as it is, swapped, back, and swapped again.

    Args:
        generator: Some steps into a text.
        last: ``[B]``, the last tokens, not taken yet.
        steps: Of each time.
        target: Where to swap to; else the first of `TARGETS` that can serve, rather not what
            serves already.
    """
    model, lengths, device = generator.model, generator.lengths(), last.device
    name = ", ".join(sorted(set(backends(model).values())))
    plain, graphs = _text(generator, last, steps), counters["stats"]["unique_graphs"]
    prepare_ms, target = _measure.timed(lambda: _prepared(model, name, target), device)
    texts, override_us, tokens = [], [], []
    for swap in (True, False, True):
        generator.rewind(lengths)
        if swap:
            override = functools.partial(override_attention_backend, model, target)
            us, token = _measure.timed(override, device)
            tokens.append(token)
        else:
            us, _ = _measure.timed(tokens.pop().undo, device)
        override_us.append(round(us * 1e3, 1))
        texts.append(_text(generator, last, steps))
    tokens.pop().undo()
    other, back, again = texts
    return {
        "from": name, "to": target, "prepare_ms": round(prepare_ms, 1),
        "override_us": override_us, "step_ms": round(statistics.median(plain.ms), 3),
        "swapped_ms": _rounded(other.ms), "back_ms": _rounded(back.ms),
        "again_ms": _rounded(again.ms),
        "graphs": device.type == "cuda",
        "compiled": counters["stats"]["unique_graphs"] - graphs,
        "back_is_same": _same(plain, back), "again_is_same": _same(other, again),
        "difference": _relative(plain.logits[0] - other.logits[0], plain.logits[0]),
        **_changes(plain, other),
    }  # fmt: skip


def _prepared(model: Any, name: str, target: str | None) -> str:
    """Let a backend be compiled and prepared, and give its name; nothing is swapped afterwards."""
    refused = []
    for each in [target] if target else sorted(TARGETS, key=name.split(", ").__contains__):
        try:
            override_attention_backend(model, each).undo()
        except AttentionOverrideError as error:
            refused.append(f"{each}: {error}")
            continue
        return each
    raise AttentionOverrideError("\n".join(refused))


def _text(generator: Paged, last: Tensor, steps: int) -> _Text:
    found = _Text([], [], [])
    for _ in range(steps):
        column = last[:, None]
        ms, logits = _measure.timed(functools.partial(generator.step, column), last.device)
        found.ms.append(ms)
        found.logits.append(logits.clone())  # the next replay writes them anew
        last = logits.argmax(-1)
        found.tokens.append(last)
    return found


def _same(one: _Text, other: _Text) -> bool:
    return all(map(torch.equal, one.tokens, other.tokens))


def _changes(plain: _Text, other: _Text) -> dict[str, Any]:
    """Count texts that go on otherwise, and tell how far the two logits are apart where they part.

    A gap is the larger one of both texts, as a part of the largest logit. Behind that point the
    texts are about different things.
    """
    rows, gaps = len(plain.tokens[0]), []
    for row in range(rows):
        pairs = zip(plain.tokens, other.tokens, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a[row] != b[row]), None)
        if at is None:
            continue
        a, b = plain.tokens[at][row], other.tokens[at][row]
        one, two = plain.logits[at], other.logits[at]
        apart = (
            _relative(one[row, a] - one[row, b], one),
            _relative(two[row, b] - two[row, a], two),
        )
        gaps.append(max(apart))
    return {"texts": rows, "parted": len(gaps), "gaps": [round(gap, 6) for gap in gaps]}


def _relative(difference: Tensor, logits: Tensor) -> float:
    return float(difference.float().abs().max() / logits.float().abs().max())


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 3) for number in numbers]
