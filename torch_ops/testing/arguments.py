"""From a Spec to the arguments of a call."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import layouts, values
from torch_ops.testing.proof import Arguments, Proof, proof_of
from torch_ops.testing.spec import Operand, Scalar, Spec


def build(spec: Spec, device: torch.device | str = "cpu") -> Arguments:
    """Makes the arguments of a call, by name and in the order of the op's signature.

    The content depends on nothing but the Spec: it is made on the CPU with a generator seeded by
    a checksum of seed and argument name (device generators and `hash` differ between machines and
    processes), then placed on the device with its strides.

    Args:
        spec: What to build.
        device: Where the tensors go.

    Returns:
        Tensors for operands, the Spec's values for scalars, None for absent operands.
    """
    proof = proof_of(spec.op)
    shapes, operands, params = proof.shapes(spec), spec.operand, spec.param
    out: Arguments = {}
    for name in proof.arguments:
        if name in operands:
            host = make(
                operands[name], shapes[name], f"{spec.seed}/{name}", filler(proof, spec, name)
            )
            out[name] = to_device(host, torch.device(device))
        elif name in params:
            out[name] = parameter(params[name])
        elif name in shapes:
            out[name] = None
    return out


def parameter(value: Scalar) -> Any:
    """What a Spec's number stands for: a text for the dtype of that name."""
    return getattr(torch, value) if isinstance(value, str) else value


def filler(proof: Proof, spec: Spec, name: str) -> Callable[[Tensor], Tensor] | None:
    """What the proof makes of the content of one argument, None where that is left as it is."""
    return None if proof.fill is None else functools.partial(proof.fill, spec, name)


def make(
    operand: Operand,
    shape: tuple[int, ...],
    key: str,
    fill: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Makes one tensor on the CPU; `key` is what its content is drawn from."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    dtype = getattr(torch, operand.dtype)
    if operand.regime in values.INDEX_REGIMES:
        content = values.INDEX_REGIMES[operand.regime](shape, generator, operand.high).to(dtype)
    elif operand.regime in values.REGIMES:
        content = values.cast(values.REGIMES[operand.regime](shape, generator), dtype).contiguous()
        values.write_specials(content, operand.specials)
    else:
        accepted = sorted([*values.REGIMES, *values.INDEX_REGIMES])
        msg = f"build: regime: received {operand.regime!r}, accepted {accepted}"
        raise ValueError(msg)
    return layouts.place(content if fill is None else fill(content), operand.layout)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor with its whole storage, so that strides, offset and gaps stay."""
    if host.device == device:
        return host
    flat = torch.empty(0, dtype=host.dtype, device=host.device).set_(host.untyped_storage())
    storage = flat.to(device)
    return torch.as_strided(storage, host.shape, host.stride(), host.storage_offset())


def contiguous(args: Arguments) -> Arguments:
    """Returns the arguments with every tensor as a fresh contiguous copy."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.clone(memory_format=torch.contiguous_format)

    return {name: copy(value) for name, value in args.items()}
