"""What the kernels in Gluon for Hopper share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = ["barriers", "device_function", "load", "store"]

_F = TypeVar("_F", bound=Callable[..., Any])

load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def device_function(function: _F) -> _F:
    """Make a function that kernels call; Triton inlines it."""
    made: _F = gluon.jit(function)
    return made


@device_function
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    """Make a barrier for each stage."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), ARRIVALS)
    return made
