"""Which layers are overridden, by an interned id that operators read from their inputs.

Layers of one model share a group, and a group has one route: an empty tensor whose size names
what all of its layers run. A compiled graph reads it once, as an input: a swap is one store, costs
no recompile, and CUDA graphs are keyed by it. A second such tensor names the layer.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ops import dynamo
from torch_ops.attention.cache import Cache
from torch_ops.attention.phases import Target
from torch_ops.errors import NotPreparedError

__all__ = ["Group", "State", "default_group", "find", "new_slot"]

_FIRST_ID = 1009  # 0 and 1 are specialised by PyTorch; small ids would be taken for batch sizes
_KEPT = 64  # routes of a group; going back to one of them replays what was recorded for it
_ids = itertools.count(_FIRST_ID)
_caches: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()
_states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()
_interned: weakref.WeakValueDictionary[frozenset[Any], State] = weakref.WeakValueDictionary()


class State:
    """Which layers are overridden with what. Immutable; equal ones are one object.

    Attributes:
        id: Names it in graphs; never used again for another one.
        overrides: Families by layer's slot; other layers run what the policy chooses.
    """

    def __init__(self, overrides: Mapping[int, Target]) -> None:
        self.id = next(_ids)
        self.overrides = overrides
        _states[self.id] = self

    @classmethod
    def of(cls, overrides: Mapping[int, Target]) -> State:
        """Give the state with these overrides, less those of layers that are gone."""
        state = _interned.get(frozenset(overrides.items()))
        if state is None:
            living = {slot: target for slot, target in overrides.items() if slot in _caches}
            state = _interned.setdefault(frozenset(living.items()), cls(living))
        return state


_NOTHING = State.of({})  # kept for ever: going back to it replays what was recorded for it


class Group:
    """Layers that are read together: all as before a swap, or all as after it.

    Attributes:
        route: The empty tensor that carries the state's id into the operator; the one place where
            it is told what runs.
        names: What `selection` keeps of the model that the layers are in.
    """

    def __init__(self) -> None:
        self.names: object = None
        self._routes: OrderedDict[State, Tensor] = OrderedDict()
        self.route = self.route_of({})

    @property
    def overrides(self) -> Mapping[int, Target]:
        """Families by layer's slot."""
        state: State = self.route._torch_ops_state  # type: ignore[attr-defined]
        return state.overrides

    def route_of(self, changes: Mapping[int, Target | None]) -> Tensor:
        """Give the route for the present overrides and these changes; storing it is the swap."""
        present = {} if not self._routes else dict(self.overrides)
        merged = {**present, **changes}
        state = State.of({slot: target for slot, target in merged.items() if target is not None})
        route = self._routes.pop(state, None)
        if route is None:
            route = _named(state.id)
            route._torch_ops_state = state  # type: ignore[attr-defined]  # lives as long
        self._routes[state] = route
        if len(self._routes) > _KEPT:
            self._routes.popitem(last=False)
        return route

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Give copies of layers a group of their own, one for all that are copied together."""
        return Group() if self.overrides else default_group

    def __reduce__(self) -> tuple[Callable[..., Group], tuple[bool]]:
        return _unpickled, (bool(self.overrides),)


def _unpickled(overridden: bool) -> Group:
    return Group() if overridden else default_group


def _named(number: int) -> Tensor:
    """Make the empty tensor that carries a number into graphs."""
    with torch.inference_mode(False):  # all alike, or graphs would be compiled anew
        tensor = torch.empty(number, 0, device="cpu", dtype=torch.float32)
    dynamo.mark_dynamic(tensor, 0)
    dynamo.keep_sizes(tensor)
    return tensor


default_group = Group()
"""Layers that were never overridden together."""


def new_slot(cache: Cache) -> Tensor:
    """Name a layer's cache in graphs."""
    cache.slot = next(_ids)
    _caches[cache.slot] = cache
    return _named(cache.slot)


def find(slot: Tensor, route: Tensor) -> tuple[Cache, Target | None]:
    """Give the layer that a graph names, and its override in the state that the graph was given.

    Raises:
        NotPreparedError: there is none of that name.
    """
    layer, number = slot.shape[0], route.shape[0]
    cache, state = _caches.get(layer), _states.get(number)
    if cache is None or state is None:
        missing = f"no layer has the id {layer}" if cache is None else f"no state the id {number}"
        raise NotPreparedError(
            f"Attention: {missing}; a compiled or exported graph is used after its layer was "
            "deleted, or in another process"
        )
    return cache, state.overrides.get(layer)
