"""Small random models of the families that are known, and what is exact for them."""

from __future__ import annotations

import copy
import importlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")
_cache: Any = importlib.import_module("torch_ops.integrations.transformers.cache")

FAMILIES = ("Llama", "Mistral", "Qwen2")
LAYERS, VOCABULARY, POSITIONS = 3, 97, 64
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
_GEMMA = {"sliding_window": 5, "layer_types": _TYPES, "query_pre_attn_scalar": 11, "head_dim": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "Mistral": {"head_dim": 8},
    "Qwen3": {"head_dim": 16, "attention_bias": True},
    "Gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {**_GEMMA, "rope_parameters": _TWO_BASES},
    "Phi3": {"sliding_window": 6, "rope_parameters": _PARTIAL, "partial_rotary_factor": 0.5},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
}
"""What makes a small model show what is special in its family."""
_paged: Any = importlib.import_module("torch_ops.integrations.transformers.paged")
SlotCache, PagedCache = _cache.SlotCache, _paged.PagedCache
OutOfPagesError = _paged.OutOfPagesError
CACHE = _cache.argument(transformers.LlamaForCausalLM)


def config(family: str = "Llama", **changes: Any) -> Any:
    """A configuration with grouped heads and odd sizes."""
    values = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, name)(**{**values, **SPECIAL.get(family, {}), **changes})


def model(family: str = "Llama", seed: int = 0, shared: Any = None, **changes: Any) -> Any:
    """A model in which no parameter is trivial; ``shared`` is a config to use as it is."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}ForCausalLM")(shared or config(family, **changes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return made.eval().requires_grad_(False)


def tokens(batch: int = 1, length: int = 9, seed: int = 0) -> Tensor:
    """Random token ids, ``[batch, length]``; none is padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def exact(untouched: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """Logits in float64, also of parts that transformers computes in float32 whatever the dtype."""
    transformers.AttentionInterface.register("exact", _exact_attention)
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionMaskInterface.register("exact", masks.eager_mask)
    wide = copy.deepcopy(untouched).double()
    wide.config._attn_implementation = "exact"
    wide.config._experts_implementation = "eager"
    for module in wide.modules():
        for suffix, forward in _EXACT.items():
            if type(module).__name__.endswith(suffix):
                module.forward = types.MethodType(forward, module)
    logits: Tensor = wide(ids, **arguments).logits
    return logits


def _exact_norm(self: Any, x: Tensor) -> Tensor:
    gemma = type(self).__name__.startswith("Gemma")
    weight, eps = (1 + self.weight, self.eps) if gemma else (self.weight, self.variance_epsilon)
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)  # type: ignore[no-any-return]


def _exact_router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x @ self.weight.T
    weights, ids = logits.softmax(-1).topk(self.top_k)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


def _exact_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * settings["scaling"]
    if settings.get("softcap") is not None:
        logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    if mask is not None:
        logits = logits + mask
    return (logits.softmax(-1) @ v.repeat_interleave(group, 1)).transpose(1, 2), None


_EXACT = {"RMSNorm": _exact_norm, "TopKRouter": _exact_router}


def assert_as_accurate(logits: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Both round the same number of times; errors of one order are all that can be asked for."""
    unit = torch.finfo(plain.dtype).eps * truth.abs().max()
    allowed = 4 * ((plain - truth).abs().max() + unit)
    error = (logits - truth).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def generate(made: Any, ids: Tensor, count: int = 12, **settings: Any) -> Tensor:
    """Greedy tokens after ``ids``."""
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    out: Tensor = made.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)
    return out
