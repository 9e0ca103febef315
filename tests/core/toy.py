"""An op with as many backends as a test wants, each of which returns a number of its own."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import Tensor

import torch_ops
from torch_ops import Backend, KernelSpec, Requirement, declare, ops
from torch_ops.contracts import Contract

PACKAGE = "toy_kernels"
_numbers = itertools.count()


@functools.cache
def declare_toy() -> declare.Declaration:
    """Declare the op; its operator stays, so this happens once a process."""

    @declare.op(
        contract=Contract(),
        order={
            "cpu": ("torch", "inductor", "triton"),
            "cuda": ("flashinfer", "triton", "torch"),
            "rocm": ("aiter", "torch"),
        },
    )
    def toy(x: Tensor, n: int = 1) -> Tensor:
        """Fill a tensor of the same shape."""
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    @toy.check
    def _check(x: Tensor, n: int = 1) -> None:
        if n < 0:
            raise ValueError(f"op 'toy': argument 'n' is {n} (accepted: a number >= 0)")

    @toy.debug_check
    def _debug_check(x: Tensor, n: int = 1) -> None:
        if bool((x < 0).any()):
            raise ValueError("op 'toy': argument 'x' has negative elements (accepted: >= 0)")

    @toy.fake
    def _fake(x: Tensor, n: int = 1) -> Tensor:
        return x.new_empty(x.shape)

    return toy


@functools.cache
def hidden_toy() -> tuple[declare.Declaration, object]:
    """Declare the op and take it out of the catalogue; gives it and its callable."""
    declaration = declare_toy()
    return declaration, vars(ops).pop(declare.declared.pop("toy").name)


class Toy:
    """The op ``toy`` with kernels that count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def serve(
        self,
        backend: Backend | str,
        value: float,
        *,
        supports: Callable[[Tensor, int], str | None] | None = None,
        requires: Iterable[Requirement] = (),
        kernel: Callable[..., Tensor] | None = None,
    ) -> KernelSpec:
        """Register a kernel that fills with ``value``, in a module of its own."""
        name = Backend(backend).value

        def toy(x: Tensor, n: int = 1) -> Tensor:
            self.calls[name] += 1
            if kernel is not None:
                return kernel(x, n)
            return torch.full(x.shape, value, dtype=x.dtype, device=x.device)

        package = f"{PACKAGE}.number{next(_numbers)}"
        module = ModuleType(f"{package}.toy")
        module.__dict__["toy"] = toy
        if supports is not None:
            ask = supports

            def predicate(x: Tensor, n: int = 1) -> str | None:
                return ask(x, n)

            module.__dict__["supports"] = predicate
        for key in (PACKAGE, package):
            sys.modules.setdefault(key, ModuleType(key))
        sys.modules[module.__name__] = module
        spec = KernelSpec("toy", name, f"{module.__name__}:toy", requires)
        return torch_ops.register_kernel(spec)

    def __call__(self, backend: Backend | str | None = None, n: int = 1) -> float:
        """Call it on a CPU tensor; gives the number of the backend that ran."""
        result = ops.toy(torch.ones(2, 3), n, backend=backend)
        assert result.shape == (2, 3)
        return float(result[0, 0])
