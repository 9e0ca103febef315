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
SlotCache = _cache.SlotCache
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
    if family == "Mistral":
        values["head_dim"] = 8
    return getattr(transformers, f"{family}Config")(**{**values, **changes})


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


def exact(untouched: Any, ids: Tensor) -> Tensor:
    """Logits in float64; norms too, which transformers computes in float32 whatever the dtype."""
    wide = copy.deepcopy(untouched).double()
    for module in wide.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_exact_norm, module)
    logits: Tensor = wide(ids).logits
    return logits


def _exact_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)  # type: ignore[no-any-return]


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
