"""Sizes of models, by the names that the sizes of examples have; from their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """One model's configuration.

    Attributes:
        hidden, heads, kv_heads, head_dim, intermediate, vocab: As everywhere.
        rotary_dim: Of a head, what is rotated; `head_dim` where None.
        norms: Further widths that are normalized, such as heads and compressed latents.
        experts, top_k, expert_intermediate: Of a mixture of experts; 0 for dense models.
        window: Tokens of a sliding window, where some layers have one.
        latent: Elements that keys and values are compressed to, without the `rotary_dim` rotated
            ones beside them; 0 where they aren't.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rotary_dim: int | None = None
    norms: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    window: int = 0
    latent: int = 0

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """What each size of an op's examples may be; those that aren't here don't vary."""
        expert = (self.expert_intermediate,) if self.experts else ()
        return {
            "hidden": (self.hidden, *self.norms),
            "half": (self.intermediate, *expert),
            "intermediate": expert or (self.intermediate,),
            "heads": (self.heads,),
            "kv_heads": (self.kv_heads,),
            "group": (self.heads // self.kv_heads,),
            "head_dim": (self.head_dim,),
            "rotary_dim": (self.rotary_dim or self.head_dim,),
            "latent": (self.latent,),
            "rope": (self.rotary_dim or self.head_dim,),
            "vocab": (self.vocab,),
            "columns": (self.vocab,),  # of a row of probabilities
            "experts": (self.experts,),
            "top_k": (self.top_k,),
        }

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Columns and inner size of a layer's products with weights: q, k, v; out; up; down."""
        inner, width = self.heads * self.head_dim, self.expert_intermediate or self.intermediate
        return (
            ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            (self.hidden, inner),
            (2 * width, self.hidden),
            (self.hidden, width),
        )


MODELS: Mapping[str, Model] = {
    "llama3-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": Model(8192, 64, 8, 128, 28672, 128256),
    "qwen3": Model(  # Qwen3-30B-A3B
        2048, 32, 4, 128, 6144, 151936, norms=(128,), experts=128, top_k=8, expert_intermediate=768
    ),
    "deepseek-v3": Model(
        7168, 128, 128, 128, 18432, 129280, rotary_dim=64, norms=(1536, 512),
        experts=256, top_k=8, expert_intermediate=2048, latent=512,
    ),
    "gemma3": Model(3840, 16, 8, 256, 15360, 262208, norms=(256,), window=1024),  # 12B
}  # fmt: skip
