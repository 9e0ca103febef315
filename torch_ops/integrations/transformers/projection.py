"""Linear layers: the product with one row, and several layers run as one over shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_ops import dynamo
from torch_ops.errors import NoBackwardError

__all__ = ["FusedLinears", "linear", "run_linear", "unfusable", "watched"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, fast for one CPU row in compiled graphs too.

    BLAS libraries that don't thread a matrix-vector product read the weights at a third of memory
    speed (MKL 2024.2 on an EPYC, 3072 x 576: 590 us); the same product as a reduction, compiled by
    Inductor, takes 180 us and is more accurate. Eager code would store the product first.

    Args:
        x: Rows, ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or None.

    Returns:
        ``[..., out]``.
    """
    traced = torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise()
    if not traced or not _is_one_cpu_row(x):
        return functional.linear(x, weight, bias)
    out = (weight * x.reshape(1, x.shape[-1])).sum(-1)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _is_one_cpu_row(x: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return all(size == 1 for size in x.shape[:-1])


def run_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Call ``layer``, by `linear` where it is a plain one that nobody watches."""
    if type(layer) is nn.Linear and not watched(layer):
        return linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


def watched(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its class says: hooks, or a forward of its own."""
    own = "forward" in layer.__dict__  # as libraries put there that move weights between devices
    return bool(own or layer._forward_hooks or layer._forward_pre_hooks)


def unfusable(layers: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Say why these layers can't be run as one, or None if they can."""
    weights: list[Tensor] = []
    with_bias: set[bool] = set()
    for name, layer in layers:
        if type(layer) is not nn.Linear:
            return f"{name} is a {type(layer).__qualname__}, not a plain torch.nn.Linear"
        if type(layer.weight.data) is not Tensor:
            return f"{name}.weight holds a {type(layer.weight.data).__qualname__}"
        if watched(layer):
            return f"{name} has forward hooks or a forward of its own, which one product skips"
        weights.append(layer.weight)
        with_bias.add(layer.bias is not None)
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1 or len(with_bias) > 1:
        return "its projections differ in dtype, device, width or bias"
    if weights[0].is_meta:
        return "its parameters are on the meta device: load the weights first"
    return None


class _Joined(NamedTuple):
    """What a child held when its rows were put into the block."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    addresses: tuple[int, int]


class FusedLinears(nn.Module):
    """Base of modules that run several of their `torch.nn.Linear` children as one product.

    The children stay where they are, so names in ``state_dict`` don't change. Their parameters
    become views of one block of memory, which the product reads: nothing is stored twice, and
    whatever is written to a parameter is seen. Until `fuse` is called the children run one by one,
    as they do while one has a hook or a parameter that isn't in the block, and a child alone always
    runs as it is. A graph that is compiled already sees neither, as it sees no new hooks anywhere,
    but for what ``load_state_dict()`` or ``to()`` of this module or one around it brings.
    """

    fused: tuple[str, ...] = ()
    _joined: tuple[_Joined, ...] = ()

    def __init__(
        self, original: nn.Module, fused: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        super().__init__()
        for name, child in original.named_children():  # in their order: that of the state
            if name in fused or name in others:
                self.add_module(name, child)
        self.fused = fused
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _fuse_after_loading
        )

    def fuse(self) -> None:
        """Put the children's parameters into one block, unless they are."""
        layers = [getattr(self, name) for name in self.fused]
        if len(layers) == 1 or unfusable(zip(self.fused, layers, strict=True)) is not None:
            self._weight = self._bias = None
            return
        self._weight = _join([layer.weight for layer in layers])
        bias = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _join(bias) if bias else None
        self._joined = tuple(
            _Joined(name, layer.weight, layer.bias, _addresses(layer.weight, layer.bias))
            for name, layer in zip(self.fused, layers, strict=True)
        )

    def unfuse(self) -> None:
        """Give each parameter memory of its own again."""
        if self._weight is None:
            return
        for name in self.fused:
            for parameter in getattr(self, name).parameters(recurse=False):
                parameter.data = parameter.data.clone()
        self._weight = self._bias = None

    def project(self, x: Tensor) -> Tensor:
        """The children's outputs for ``x``, side by side in the last dimension."""
        if len(self.fused) == 1:
            return run_linear(getattr(self, self.fused[0]), x)
        if self._weight is None or not self._whole():
            return torch.cat([getattr(self, name)(x) for name in self.fused], dim=-1)
        if torch.is_grad_enabled():
            self._refuse_gradients()
        return linear(x, self._weight, self._bias)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _whole(self) -> bool:
        """Whether the block is all that its children compute with; asked once a compiled graph.

        Guards on every parameter would take longer than the product of a small model.
        """
        for name, weight, bias, addresses in self._joined:
            layer: Any = self._modules[name]
            if layer is None or watched(layer):
                return False
            held = layer._parameters
            if held.get("weight") is not weight or held.get("bias") is not bias:
                return False
            if _addresses(weight, bias) != addresses:
                return False
        return True

    def _refuse_gradients(self) -> None:
        for name in self.fused:
            if getattr(self, name).weight.requires_grad:
                raise NoBackwardError(
                    f"{type(self).__name__}: {name}.weight requires grad, and the accelerated "
                    "model has no backward; call it under torch.no_grad() or "
                    "torch.inference_mode(), or undo() the acceleration to train"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.fused and self.__dict__.get("_weight") is not None:
            self.fuse()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinears:
        fused = self._weight is not None
        self._weight = self._bias = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if fused:
            self.fuse()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the block would no longer be what the copied parameters are views of.
        state = self.__dict__.copy()
        state["_weight"], state["_bias"], state["_joined"] = self._weight is not None, None, ()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        fused, state["_weight"] = state["_weight"], None
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if fused:
            self.fuse()


def _addresses(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr()


def _fuse_after_loading(module: FusedLinears, _incompatible: Any) -> None:
    # load_state_dict(assign=True) brings new parameters, with memory of their own.
    if module._weight is not None:
        module.fuse()


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """Return one tensor over all rows; copies only if they don't follow each other in memory."""
    first = parameters[0]
    rows = sum(parameter.shape[0] for parameter in parameters)
    if _adjacent(parameters):
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())
    block = torch.cat([parameter.data for parameter in parameters])
    pieces = block.split([parameter.shape[0] for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece
    return block


def _adjacent(parameters: list[nn.Parameter]) -> bool:
    storage = parameters[0].untyped_storage()
    place = parameters[0].storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage()._cdata != storage._cdata or not parameter.is_contiguous():
            return False
        if parameter.storage_offset() != place:
            return False
        place += parameter.numel()
    return True
