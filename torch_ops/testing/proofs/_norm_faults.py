"""A plain norm in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.faults import directed

Mean = Callable[[Tensor], Tensor]
Root = Callable[[Tensor, float], Tensor]
Gain = Callable[[Tensor, torch.dtype], Tensor]
Finish = Callable[[Tensor, torch.dtype], Tensor]


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares of each row."""
    return x.square().mean(-1, keepdim=True)


def inverse_root(mean: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean + eps)."""
    return (mean + eps).rsqrt()


def plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the compute dtype."""
    return weight.to(dtype)


def one_plus(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """1 + weight in the compute dtype."""
    return 1 + weight.to(dtype)


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to nearest."""
    return y.to(dtype)


def rms(
    mean: Mean = mean_square,
    root: Root = inverse_root,
    gain: Gain = plain,
    finish: Finish = nearest,
) -> Callable[..., Tensor]:
    """Returns an rms norm made of these pieces."""

    def norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        compute = compute_dtype(x.dtype)
        exact = x.to(compute).contiguous()
        y = exact * root(mean(exact), eps)
        if weight is not None:
            y = y * gain(weight, compute)
        return finish(y, x.dtype)

    return norm


def first_row(mean: Tensor) -> Tensor:
    """The statistic of row 0 for every row."""
    return mean.reshape(-1)[:1].expand(mean.shape) if mean.numel() else mean


def previous_row(mean: Tensor) -> Tensor:
    """The statistic of the row before."""
    return mean.reshape(-1).roll(1).reshape(mean.shape)


def repeated_rows(count: int) -> Callable[[Tensor], Tensor]:
    """Row i reads the statistic of row i modulo `count`: an index cut short."""

    def change(mean: Tensor) -> Tensor:
        flat = mean.reshape(-1)
        if not flat.numel():
            return mean
        return flat[torch.arange(flat.numel()) % count].reshape(mean.shape)

    return change


def batch_mean(mean: Tensor) -> Tensor:
    """One statistic for the whole batch."""
    return mean.mean().expand(mean.shape) if mean.numel() else mean


def after(mean: Mean, change: Callable[[Tensor], Tensor]) -> Mean:
    """A statistic changed after it was computed."""
    return lambda x: change(mean(x))


def without_last(x: Tensor) -> Tensor:
    """Mean of squares that misses the last element."""
    if x.shape[-1] == 0:
        return mean_square(x)
    return x[..., :-1].square().sum(-1, keepdim=True) / x.shape[-1]


def half_row(x: Tensor) -> Tensor:
    """Mean of squares over the first half of the row."""
    return mean_square(x[..., : (x.shape[-1] + 1) // 2])


def bessel(x: Tensor) -> Tensor:
    """Mean of squares divided by n - 1."""
    return x.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)


def padded_block(x: Tensor) -> Tensor:
    """Mean of squares divided by the next power of two: padding is counted."""
    return x.square().sum(-1, keepdim=True) / (1 << max(x.shape[-1] - 1, 0).bit_length())


def in_half_precision(x: Tensor) -> Tensor:
    """Squares in float16: 256 squared is infinite there."""
    return x.half().square().to(x.dtype).mean(-1, keepdim=True)


def no_variance(x: Tensor) -> Tensor:
    """The variance is ignored."""
    return torch.ones_like(x[..., :1])


def with_eps(change: Callable[[float], float]) -> Root:
    """An inverse root with another eps."""
    return lambda mean, eps: inverse_root(mean, change(eps))


def eps_outside(mean: Tensor, eps: float) -> Tensor:
    """eps is added to the root instead of under it."""
    return (mean.sqrt() + eps).reciprocal()


def eps_as_floor(mean: Tensor, eps: float) -> Tensor:
    """eps is a lower limit instead of a summand."""
    return mean.clamp(min=eps).rsqrt()


def eps_squared(mean: Tensor, eps: float) -> Tensor:
    """The root of mean squared plus eps squared."""
    root: float = eps**0.5
    return (mean.sqrt() + root).reciprocal()


def without_eps(mean: Tensor, eps: float) -> Tensor:
    """No eps: a zero row divides zero by zero."""
    return mean.rsqrt()


def eps_in_half(mean: Tensor, eps: float) -> Tensor:
    """mean + eps in float16, where a small eps is zero."""
    small = torch.tensor(eps / 1024, dtype=torch.float16, device=mean.device).to(mean.dtype)
    return (mean + small).rsqrt()


def rounded_root(mean: Tensor, eps: float) -> Tensor:
    """The inverse root is rounded to bfloat16."""
    return inverse_root(mean, eps).bfloat16().to(mean.dtype)


def half_up(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to nearest, ties toward plus infinity instead of to even."""
    return directed(y, dtype, lambda mantissa: (mantissa + 0.5).floor())


def clipped(limit: float) -> Finish:
    """The result is clipped, as if it went through a narrower format."""
    return lambda y, dtype: y.clamp(-limit, limit).to(dtype)


def layer(
    mean: Mean = lambda x: x.mean(-1, keepdim=True),
    variance: Callable[[Tensor, Tensor], Tensor] = lambda x, mu: mean_square(x - mu),
    root: Root = inverse_root,
    finish: Finish = nearest,
) -> Callable[..., Tensor]:
    """Returns a layer norm made of these pieces."""

    def norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        compute = compute_dtype(x.dtype)
        exact = x.to(compute).contiguous()
        mu = mean(exact)
        y = (exact - mu) * root(variance(exact, mu), eps)
        if weight is not None:
            y = y * weight.to(compute)
        if bias is not None:
            y = y + bias.to(compute)
        return finish(y, x.dtype)

    return norm


def one_pass(x: Tensor, mu: Tensor) -> Tensor:
    """Variance as mean of squares minus square of mean: cancels where the mean dwarfs it."""
    return mean_square(x) - mu.square()


def counted_padding(x: Tensor, mu: Tensor) -> Tensor:
    """Variance that also sums (0 - mean)^2 over the padding up to a power of two."""
    extra = (1 << max(x.shape[-1] - 1, 0).bit_length()) - x.shape[-1]
    return mean_square(x - mu) + extra * mu.square() / max(x.shape[-1], 1)


def fused_add(
    norm: Callable[..., Tensor] | None = None,
    add: Callable[[Tensor, Tensor], Tensor] = torch.add,
    store: Finish = nearest,
    exact: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a fused add and norm; `exact` takes the norm of the unrounded sum."""
    inner = norm or rms()

    def fused(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        compute = compute_dtype(x.dtype)
        total = add(x.to(compute), residual.to(compute)).contiguous()
        stored = store(total, x.dtype).contiguous()
        if exact:
            return inner(total, weight, eps).to(x.dtype), stored
        return inner(stored, weight, eps), stored

    return fused
