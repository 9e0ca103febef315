"""Laws of rotary embeddings, and how elements pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.testing.laws import alone, homogeneous, negated, permuted_rows, rounding_bias
from torch_ops.testing.proof import Law, Pair, Trial


def pairs_of(x: Tensor, rotary_dim: int, is_neox: bool) -> tuple[Tensor, Tensor]:
    """First and second elements of the pairs."""
    turned = x[..., :rotary_dim]
    if is_neox:
        return turned[..., : rotary_dim // 2], turned[..., rotary_dim // 2 :]
    return turned[..., 0::2], turned[..., 1::2]


def joined(first: Tensor, second: Tensor, tail: Tensor, is_neox: bool) -> Tensor:
    """The inverse of `pairs_of`, with the elements past rotary_dim."""
    if is_neox:
        return torch.cat([first, second, tail], -1)
    return torch.cat([torch.stack([first, second], -1).flatten(-2), tail], -1)


def _compared(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    return [
        Pair(f"{name}, {what}", a, b) for name, a, b in zip(("q", "k"), got, expected, strict=True)
    ]


def _zero_angle(trial: Trial) -> Sequence[Pair]:
    cache = torch.zeros_like(trial.args["cos_sin_cache"])
    cache[:, : cache.shape[1] // 2] = 1
    got = trial.run(cos_sin_cache=cache)
    return _compared("angle 0", got, (trial.args["q"], trial.args["k"]))


def _quarter_turn(trial: Trial) -> Sequence[Pair]:
    cache = torch.zeros_like(trial.args["cos_sin_cache"])
    width, is_neox = cache.shape[1], trial.args["is_neox"]
    cache[:, width // 2 :] = 1

    def turned(x: Tensor) -> Tensor:
        a, b = pairs_of(x, width, is_neox)
        return joined(-b, a, x[..., width:], is_neox)

    expected = (turned(trial.args["q"]), turned(trial.args["k"]))
    return _compared("quarter turn", trial.run(cos_sin_cache=cache), expected)


def _tail(trial: Trial) -> Sequence[Pair] | None:
    width = trial.spec.dim["rotary_dim"]
    if width == trial.spec.dim["head_dim"]:
        return None
    got = [o[..., width:] for o in trial.outputs]
    return _compared("past rotary_dim", got, [trial.args[n][..., width:] for n in ("q", "k")])


def _index_width(trial: Trial) -> Sequence[Pair]:
    other = torch.int32 if trial.args["positions"].dtype == torch.int64 else torch.int64
    got = trial.run(positions=trial.args["positions"].to(other))
    return _compared(f"positions {other}", got, trial.outputs)


def _pairing(trial: Trial) -> Sequence[Pair]:
    """Rotating pairs (i, i + h) is rotating pairs (2i, 2i + 1) of reordered elements."""
    width, is_neox = trial.spec.dim["rotary_dim"], trial.args["is_neox"]

    def reordered(x: Tensor, source: bool) -> Tensor:
        a, b = pairs_of(x, width, source)
        return joined(a, b, x[..., width:], not source)

    inputs = {n: reordered(trial.args[n], is_neox) for n in ("q", "k")}
    got = trial.run(**inputs, is_neox=not is_neox)
    return _compared("other pairing", [reordered(x, not is_neox) for x in got], trial.outputs)


def _apart(trial: Trial) -> Sequence[Pair]:
    q, k = trial.args["q"], trial.args["k"]
    more = torch.cat([k, 2 * k, k + 1], dim=1)
    return [
        Pair("q, other keys", trial.run(k=more)[0], trial.outputs[0]),
        Pair("k, other queries", trial.run(q=torch.cat([q, q + 1], dim=1))[1], trial.outputs[1]),
    ]


LAWS = (
    Law("zero_angle", "cos 1 and sin 0 change nothing", _zero_angle),
    Law("quarter_turn", "cos 0 and sin 1 turn (a, b) into (-b, a)", _quarter_turn),
    Law("tail", "elements past rotary_dim are copied", _tail),
    Law("index_width", "int32 and int64 positions give the same", _index_width),
    Law("pairing", "neox(x) == P interleaved(P x)", _pairing),
    Law("apart", "queries don't depend on keys, nor keys on queries", _apart),
    homogeneous("scale", {"q": 3, "k": 3}, (3, 3), "f(8 q, 8 k) == 8 f(q, k)"),
    rounding_bias(),
    negated("odd", ("q", "k"), (-1, -1), "f(-q, -k) == -f(q, k)"),
    permuted_rows(("q", "k", "positions"), "tokens don't know each other"),
    alone(("q", "k", "positions")),
)
