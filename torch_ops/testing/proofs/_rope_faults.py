"""A plain rotation in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.faults import (
    floored,
    generic_mutants,
    mutating_mutants,
    raised,
    truncated,
)
from torch_ops.testing.proof import Mutant

Rows = Callable[[Tensor, Tensor], Tensor]


def _rows(cache: Tensor, positions: Tensor) -> Tensor:
    return cache[positions.long()]


def _halves(angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.chunk(2, -1)
    return cos, sin


def _turn(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return a * cos - b * sin, b * cos + a * sin


def _nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)


def _same(x: Tensor) -> Tensor:
    return x


def rope(
    rows: Rows = _rows,
    halves: Callable[[Tensor], tuple[Tensor, Tensor]] = _halves,
    turn: Callable[..., tuple[Tensor, Tensor]] = _turn,
    finish: Callable[[Tensor, torch.dtype], Tensor] = _nearest,
    tail: Callable[[Tensor], Tensor] = _same,
    compute: torch.dtype | None = None,
    pairing: Callable[[bool], bool] = bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a rotary embedding made of these pieces."""

    def one(x: Tensor, angles: Tensor, is_neox: bool) -> Tensor:
        work = compute or compute_dtype(x.dtype)
        width = angles.shape[-1]
        cos, sin = (part.to(work).unsqueeze(1) for part in halves(angles))
        exact = x.contiguous()[..., :width].to(work)
        if is_neox:
            a, b = exact[..., : width // 2], exact[..., width // 2 :]
        else:
            a, b = exact[..., 0::2], exact[..., 1::2]
        first, second = turn(a, b, cos, sin)
        both = torch.cat([first, second], -1) if is_neox else torch.stack([first, second], -1)
        turned = finish(both.reshape(exact.shape), x.dtype)
        return torch.cat([turned, tail(x.contiguous()[..., width:])], -1)

    def kernel(
        q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        angles = rows(cos_sin_cache, positions)
        return one(q, angles, pairing(is_neox)), one(k, angles, pairing(is_neox))

    return kernel


def _swapped(angles: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(angles)[::-1]


def _interleaved(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles[..., 0::2], angles[..., 1::2]


def _half_cache(angles: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(angles.bfloat16())


def _other_sense(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return a * cos + b * sin, b * cos - a * sin


def _last_pair_lost(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = _turn(a, b, cos, sin)
    first[..., -1:], second[..., -1:] = 0, 0
    return first, second


def _first_reused(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The second element is computed from the first one's new value: written in place too early."""
    first = a * cos - b * sin
    return first, b * cos + first * sin


def _only_cos(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return a * cos, b * cos


def _shifted_rows(amount: int, width: torch.dtype | None = None) -> Rows:
    def rows(cache: Tensor, positions: Tensor) -> Tensor:
        if width is not None and positions.dtype != width:
            return _rows(cache, positions)
        return _rows(cache, (positions.long() + amount) % max(cache.shape[0], 1))

    return rows


def _words(cache: Tensor, positions: Tensor) -> Tensor:
    """Reads 64-bit positions as if they were 32-bit ones."""
    words = positions.contiguous().view(torch.int32)[: positions.shape[0]]
    return _rows(cache, words)


def _narrow(cache: Tensor, positions: Tensor) -> Tensor:
    """Cuts 64-bit positions to 4 bits."""
    return _rows(cache, positions % 16 if positions.dtype == torch.int64 else positions)


def _token_0(cache: Tensor, positions: Tensor) -> Tensor:
    return _rows(cache, positions[:1].expand(positions.shape))


def _token_before(cache: Tensor, positions: Tensor) -> Tensor:
    return _rows(cache, positions.roll(1))


def _few_tokens(cache: Tensor, positions: Tensor) -> Tensor:
    if not positions.numel():
        return _rows(cache, positions)
    return _rows(cache, positions[torch.arange(len(positions)) % 2])


def _counted(cache: Tensor, positions: Tensor) -> Tensor:
    """Position i for token i, whatever the argument says."""
    return _rows(cache, torch.arange(len(positions)) % max(cache.shape[0], 1))


def _all_rotated(q: Tensor, k: Tensor, cache: Tensor, p: Tensor, neox: bool = True) -> Any:
    """Rotates the whole head: the tail gets the angles again."""
    extra = q.shape[-1] - cache.shape[-1]
    cos, sin = cache.chunk(2, -1)
    if cache.shape[-1] == 0:
        return rope(tail=lambda t: -t)(q, k, cache, p, neox)
    times = 2 + extra // cache.shape[-1]
    width = q.shape[-1] // 2
    wide = torch.cat([cos.repeat(1, times)[:, :width], sin.repeat(1, times)[:, :width]], -1)
    return rope()(q, k, wide, p, neox)


def _wide_pairs(q: Tensor, k: Tensor, cache: Tensor, p: Tensor, neox: bool = True) -> Any:
    """Pairs i with i + head_dim / 2 although fewer elements are rotated."""
    half, width = q.shape[-1] // 2, cache.shape[-1] // 2
    if not neox or q.shape[-1] % 2:
        return rope()(q, k, cache, p, neox)
    order = torch.cat([torch.arange(width), half + torch.arange(width)])
    rest = torch.tensor([i for i in range(q.shape[-1]) if i not in set(order.tolist())]).long()
    order = torch.cat([order, rest])
    back = order.argsort()
    outputs = rope()(q[..., order], k[..., order], cache, p, neox)
    return tuple(o[..., back].contiguous() for o in outputs)


def _as_many_heads_as_keys(
    q: Tensor, k: Tensor, cache: Tensor, p: Tensor, neox: bool = True
) -> Any:
    out_q, out_k = rope()(q, k, cache, p, neox)
    return torch.cat([out_q[:, : k.shape[1]], q[:, k.shape[1] :]], 1), out_k


def _leaks(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def kernel(q: Tensor, k: Tensor, cache: Tensor, p: Tensor, neox: bool = True) -> Any:
        out_q, out_k = rope()(q, k, cache, p, neox)
        return change(out_q, k), out_k

    return kernel


def _first_key_added(out: Tensor, k: Tensor) -> Tensor:
    if k.numel() == 0:
        return out
    return out + k.reshape(-1)[:1] * 2**-4 + (k.shape[1] - 1) * 2**-4


def _count_added(out: Tensor, k: Tensor) -> Tensor:
    return out + k.shape[1]


def _by_tokens(limit: int) -> Callable[..., Any]:
    """Other arithmetic for up to `limit` tokens: as right, but not the same bits."""

    def kernel(q: Tensor, k: Tensor, cache: Tensor, p: Tensor, neox: bool = True) -> Any:
        turn = _turn_by_differences if q.shape[0] <= limit else _turn
        return rope(turn=turn)(q, k, cache, p, neox)

    return kernel


def _turn_by_differences(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (a - b) * cos + b * (cos - sin), (b - a) * cos + a * (cos + sin)


def _refusing(refuses: Callable[[int], bool]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A right kernel whose predicate reads the number of tokens."""

    def supports(q: Tensor, *_: object) -> str | None:
        return f"{q.shape[0]} tokens" if refuses(q.shape[0]) else None

    kernel = rope()
    kernel.supports = supports  # type: ignore[attr-defined]
    return kernel


def mutants() -> tuple[Mutant, ...]:
    """Faults of rotations; they return their outputs."""
    return (
        Mutant("cos_and_sin_swapped", ("zero_angle", "quarter_turn", "bound"),
               rope(halves=_swapped)),
        Mutant("cache_interleaved", ("zero_angle", "quarter_turn", "bound"),
               rope(halves=_interleaved)),
        Mutant("last_pair_lost", ("zero_angle", "quarter_turn", "bound"),
               rope(turn=_last_pair_lost)),
        Mutant("turned_backwards", ("quarter_turn", "bound"), rope(turn=_other_sense)),
        Mutant("first_written_early", ("quarter_turn", "bound"), rope(turn=_first_reused)),
        Mutant("no_sines", ("quarter_turn", "bound"), rope(turn=_only_cos)),
        Mutant("bfloat16_cache", ("bound",), rope(halves=_half_cache)),
        Mutant("bfloat16_arithmetic", ("bound",), rope(compute=torch.bfloat16)),
        Mutant("truncated", ("rounding_bias", "bound",), rope(finish=truncated)),
        Mutant("next_position", ("bound",), rope(rows=_shifted_rows(1))),
        Mutant("positions_ignored", ("bound",), rope(rows=_counted)),
        Mutant("tail_rotated", ("tail", "bound"), _all_rotated),
        Mutant("tail_zeroed", ("tail", "bound"), rope(tail=torch.zeros_like)),
        Mutant("tail_negated", ("tail", "bound"), rope(tail=torch.neg)),
        Mutant("tail_reversed", ("tail", "bound"), rope(tail=lambda t: t.flip(-1))),
        Mutant("pairs_across_head", ("quarter_turn", "bound"), _wide_pairs),
        Mutant("int64_as_int32", ("index_width", "bound"), rope(rows=_words)),
        Mutant("int64_cut_to_4_bits", ("index_width", "bound"), rope(rows=_narrow)),
        Mutant("int32_off_by_one", ("index_width", "bound"),
               rope(rows=_shifted_rows(1, torch.int32))),
        Mutant("always_neox", ("pairing", "bound"), rope(pairing=lambda _: True)),
        Mutant("always_interleaved", ("pairing", "bound"), rope(pairing=lambda _: False)),
        Mutant("pairings_swapped", ("bound",), rope(pairing=lambda neox: not neox)),
        Mutant("interleaved_turned_backwards", ("pairing", "bound"),
               lambda q, k, c, p, neox=True: rope(turn=_turn if neox else _other_sense)(
                   q, k, c, p, neox)),
        Mutant("heads_of_keys", ("apart", "bound"), _as_many_heads_as_keys),
        Mutant("key_leaks", ("apart", "bound"), _leaks(_first_key_added)),
        Mutant("head_count_leaks", ("apart", "bound"), _leaks(_count_added)),
        Mutant("result_clipped", ("scale", "bound"),
               rope(finish=lambda y, d: y.clamp(-2, 2).to(d))),
        Mutant("constant_added", ("scale", "bound"), rope(finish=lambda y, d: (y + 0.125).to(d))),
        Mutant("squared", ("scale", "bound"), rope(finish=lambda y, d: (y * y.abs()).to(d))),
        Mutant("rounded_down", ("rounding_bias", "odd", "bound"), rope(finish=floored)),
        Mutant("rounded_up", ("rounding_bias", "odd", "bound"), rope(finish=raised)),
        Mutant("absolute_value", ("odd", "bound"), rope(finish=lambda y, d: y.abs().to(d))),
        Mutant("token_0_for_all", ("row_permutation", "bound"), rope(rows=_token_0)),
        Mutant("token_before", ("row_permutation", "bound"), rope(rows=_token_before)),
        Mutant("fast_path_for_one_token", ("batch_invariance",), _by_tokens(1)),
        Mutant("fast_path_for_few_tokens", ("batch_invariance",), _by_tokens(4)),
        Mutant("fast_path_for_many_tokens", ("batch_invariance",), _by_tokens(16)),
        Mutant("predicate_wants_several", ("batch_invariance",), _refusing(lambda n: n == 1)),
        Mutant("predicate_wants_few", ("batch_invariance",), _refusing(lambda n: n > 8)),
        Mutant("predicate_wants_pairs", ("batch_invariance",), _refusing(lambda n: n % 2 == 1)),
        Mutant("two_tokens_for_all", ("row_permutation", "bound"), rope(rows=_few_tokens)),
    )  # fmt: skip


def generic(*, in_place: bool) -> tuple[Mutant, ...]:
    """Generic faults, for the op that returns its outputs or the one that writes its inputs."""
    return mutating_mutants(rope(), (0, 1)) if in_place else generic_mutants(rope())
