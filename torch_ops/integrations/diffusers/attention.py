"""Attention processors of diffusers on ``torch_ops.apply_rope`` and ``torch_ops.attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_ops.attention import Attention, AttentionBackend
from torch_ops.integrations.diffusers.masks import attend_to_real
from torch_ops.integrations.diffusers.rope import rotate

__all__ = ["FluxProcessor", "Processor", "QwenImageProcessor", "SD3Processor", "WanProcessor"]

_OWN = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Heads = tuple[Tensor, Tensor, Tensor]


class Processor(nn.Module):
    """Base of the processors: a layer of torch_ops, and what is around it.

    Each attention module has one of its own, so that an override finds the layer by its path;
    what diffusers keeps for the whole process isn't read.
    """

    def __init__(self, attn: Any, backend: AttentionBackend | str | None = None) -> None:
        super().__init__()
        self.head_dim = int(attn.inner_dim // attn.heads)
        self.attention = Attention(attn.heads, self.head_dim, backend=backend, role=self.role(attn))
        # Where and in which dtype the layer will run decides what serves it.
        for parameter in attn.parameters():
            if parameter.dtype in _DTYPES:
                self.attention.to(parameter.device, parameter.dtype)
                break

    @staticmethod
    def role(attn: Any) -> str:
        """Name the layer's role: over one stream of tokens, two, or from one to another."""
        return "self" if getattr(attn, "add_q_proj", None) is None else "joint"

    @property
    def _attention_backend(self) -> None:
        return None

    @_attention_backend.setter
    def _attention_backend(self, value: object) -> None:
        _refuse("set_attention_backend", value, "override_attention_backend of torch_ops.attention")

    @property
    def _parallel_config(self) -> None:
        return None

    @_parallel_config.setter
    def _parallel_config(self, value: object) -> None:
        _refuse("enable_parallelism", value, "a model that isn't accelerated")

    def heads(self, attn: Any, x: Tensor, names: tuple[str, ...], fused: str = "") -> _Heads:
        """Give queries, keys and values ``[B, S, H, D]`` of ``x``, normalized head by head.

        Args:
            attn: Holds the projections and norms.
            x: ``[B, S, hidden]``.
            names: Of three projections and of the norms of queries and keys.
            fused: Name of a projection that makes all three, or nothing.
        """
        if fused:
            parts = list(getattr(attn, fused)(x).chunk(3, dim=-1))
        else:
            parts = [getattr(attn, name)(x) for name in names[:3]]
        parts = [part.unflatten(-1, (-1, self.head_dim)) for part in parts]
        for number, name in enumerate(names[3:]):
            norm = getattr(attn, name, None)
            if norm is not None:
                parts[number] = norm(parts[number])
        q, k, v = parts
        return q, k, v

    def attend(
        self, streams: list[_Heads], mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Attend over all streams, one behind the other; ``[B, S, H * D]``."""
        q, k, v = streams[0] if len(streams) == 1 else _join(*streams)
        if rotary is not None:
            q, k = rotate(q, k, rotary)
        if mask is None:
            out: Tensor = self.attention(q, k, v)
        else:
            out = attend_to_real(self.attention, q, k, v, mask)
        return out.flatten(2)


class FluxProcessor(Processor):
    """Stands in for ``FluxAttnProcessor``: text, then image."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attend; the arguments are those of the processor that this one stands in for.

        Args:
            attn: The module whose processor this is.
            hidden_states: ``[B, S, hidden]``.
            encoder_hidden_states: ``[B, S_text, hidden]`` in blocks of two streams.
            attention_mask: Which keys are attended to, see `attend_to_real`.
            image_rotary_emb: See `as_table`.

        Returns:
            As ``hidden_states`` or, where there are two streams, a pair of image and text.
        """
        image, text = hidden_states, encoder_hidden_states
        own, added = ("to_qkv", "to_added_qkv") if attn.fused_projections else ("", "")
        streams = [self.heads(attn, image, _OWN, own)]
        if text is None:
            return self.attend(streams, attention_mask, image_rotary_emb)
        streams.insert(0, self.heads(attn, text, _ADDED, added))
        out = self.attend(streams, attention_mask, image_rotary_emb)
        text, image = out.split([text.shape[1], image.shape[1]], dim=1)
        return _through(attn.to_out, image), attn.to_add_out(text)


class SD3Processor(Processor):
    """Stands in for ``JointAttnProcessor2_0``: image, then text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Attend, as `FluxProcessor` does; the original disregards other arguments, too."""
        if attention_mask is not None:
            shape = list(attention_mask.shape)
            raise ValueError(
                f"attention_mask: received one of shape {shape}, accepted: None; the original "
                "disregards it"
            )
        image, text = hidden_states, encoder_hidden_states
        streams = [self.heads(attn, image, _OWN)]
        if text is not None:
            streams.append(self.heads(attn, text, _ADDED))
        out = self.attend(streams, None, None)
        if text is None:
            return _through(attn.to_out, out)
        image, text = out.split([image.shape[1], text.shape[1]], dim=1)
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return _through(attn.to_out, image), text


class QwenImageProcessor(Processor):
    """Stands in for ``QwenDoubleStreamAttnProcessor2_0``: text, then image."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend, as `FluxProcessor` does; ``encoder_hidden_states_mask`` is of the text's keys."""
        image, text, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
        if mask is not None:
            attention_mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)
        streams = [self.heads(attn, text, _ADDED), self.heads(attn, image, _OWN)]
        out = self.attend(streams, attention_mask, image_rotary_emb)
        text, image = out.split([text.shape[1], image.shape[1]], dim=1)
        return _through(attn.to_out, image), attn.to_add_out(text)


class WanProcessor(Processor):
    """Stands in for ``WanAttnProcessor``: one stream to itself or to another, without an image."""

    @staticmethod
    def role(attn: Any) -> str:
        """Name the layer's role."""
        return "cross" if attn.is_cross_attention else "self"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend, as `FluxProcessor` does, with norms over all heads together."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if not attn.fused_projections:
            parts = [attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)]
        elif attn.is_cross_attention:
            parts = [attn.to_q(hidden_states), *attn.to_kv(source).chunk(2, dim=-1)]
        else:
            parts = list(attn.to_qkv(hidden_states).chunk(3, dim=-1))
        parts[:2] = attn.norm_q(parts[0]), attn.norm_k(parts[1])
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return _through(attn.to_out, self.attend([(q, k, v)], attention_mask, rotary_emb))


def _join(first: _Heads, second: _Heads) -> _Heads:
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    return q, k, v


def _through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _refuse(what: str, value: object, instead: str) -> None:
    if value is not None:
        raise ValueError(
            f"{what}: received {value!r} for attention that runs on torch_ops, accepted: None; use "
            f"{instead}, or undo() the acceleration first"
        )
