"""`SlotCache`: keys and values in memory allocated once, handed out as views of what is filled."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from torch_ops import dynamo

__all__ = ["SlotCache", "argument", "layer_sizes"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def argument(model: Any) -> str:
    """Name of the argument by which a model takes a cache: it was renamed in transformers 5.20."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


class LayerSizes(NamedTuple):
    """What a cache knows of the layers of a decoder, and the most tokens that it takes."""

    layers: int
    heads: int
    head_dim: int
    positions: int


def layer_sizes(cache: str, config: Any, dtype: torch.dtype) -> LayerSizes:
    """Read a config.

    Args:
        cache: Its class, for the messages.
        config: A model's config.
        dtype: Of keys and values.

    Raises:
        TypeError: it isn't a config.
        ValueError: attention can't read keys of this dtype.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"{cache}: argument 'config' is a {type(config).__name__} (accepted: a config of "
            "transformers, such as model.config)"
        )
    if dtype not in _DTYPES:
        raise ValueError(
            f"{cache}: argument 'dtype' is {dtype} (accepted: one of "
            f"{', '.join(map(str, _DTYPES))}; attention reads keys of its queries' dtype)"
        )
    config = config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    return LayerSizes(layers, heads, head_dim, int(config.max_position_embeddings))


def _described(rows: tuple[int, ...], dim: int, dtype: torch.dtype) -> str:
    return f"{rows[0]} sequences, {rows[1]} heads of {dim}, {dtype}"


class _Fill:
    """How many slots are filled; the same for all layers.

    The number is a size of an empty tensor, because a compiled graph takes sizes as inputs, while
    it is compiled anew for each value of a Python int that it finds in an object.
    """

    def __init__(self) -> None:
        self.set(0)

    def set(self, length: int) -> None:
        self.extent = torch.empty(length, 0)
        if not (torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise()):
            dynamo.mark_dynamic(self.extent, 0)
            dynamo.mark_static_address(self.extent)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Slots of one layer, ``[B, K, slots, D]``."""

    keys: Any  # never None here, as it may be in the base class
    values: Any

    is_compileable = False  # what transformers calls so hands out unfilled slots, too
    is_croppable = True
    is_sliding = False

    def __init__(self, keys: Tensor, fill: _Fill, *, is_last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = torch.zeros_like(keys)
        self.is_initialized = True
        self._fill = fill
        self._is_last = is_last

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is allocated on construction."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write behind what is filled and return all that is filled then."""
        rows = self.keys.shape[:2], self.keys.shape[3], self.keys.dtype
        received = key_states.shape[:2], key_states.shape[3], key_states.dtype
        if received != rows:
            raise ValueError(
                f"SlotCache: received keys of {_described(*received)}, accepted: of "
                f"{_described(*rows)}, as it was made"
            )
        start = self._fill.extent.shape[0]
        stop = start + key_states.shape[2]
        if stop > self.keys.shape[2]:
            raise ValueError(
                f"SlotCache: received {stop} tokens in all, accepted: at most {self.keys.shape[2]} "
                "slots; allocate more"
            )
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        if self._is_last:
            self._fill.set(stop)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that ``query_length`` more tokens see, and where they start."""
        return self._fill.extent.shape[0] + query_length, 0

    def get_seq_length(self) -> int:
        """Number of filled slots."""
        return self._fill.extent.shape[0]

    def get_max_length(self) -> int:
        """Number of slots."""
        return int(self.keys.shape[2])

    def reset(self) -> None:
        """Empty all slots."""
        self._fill.set(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: it is positive, or there are less.
        """
        filled = self._fill.extent.shape[0]
        if self._is_last:
            if not -filled <= tokens_to_remove <= 0:
                raise ValueError(
                    f"SlotCache: crop of {int(tokens_to_remove)} (accepted: -{filled} to 0, minus "
                    "the tokens to remove)"
                )
            self._fill.set(filled + int(tokens_to_remove))


class SlotCache(Cache):
    """A cache for compiled decoding: no copy per token, no mask, no graph per length.

    Memory is allocated once. Attention reads a view of the filled slots, so it never sees the
    others, and ``torch.compile`` needs one graph for the prompt and one for all further tokens.

    Args:
        config: The model's config.
        slots: Most tokens that fit, prompt included.
        batch_size: Sequences, all of one length.
        dtype: Of keys and values.
        device: Of keys and values.

    Raises:
        ValueError: a number is below 1, or attention can't read the dtype.
    """

    def __init__(
        self,
        config: Any,
        slots: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("slots", slots), ("batch_size", batch_size)):
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"SlotCache: argument {name!r} is {value!r} (accepted: an int >= 1)"
                )
        sizes = layer_sizes("SlotCache", config, dtype)
        fill, last = _Fill(), sizes.layers - 1
        shape = (batch_size, sizes.heads, slots, sizes.head_dim)
        super().__init__(
            layers=[
                _SlotLayer(
                    torch.zeros(shape, dtype=dtype, device=device),
                    fill,
                    is_last=i == last,
                )
                for i in range(sizes.layers)
            ]
        )
