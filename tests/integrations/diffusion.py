"""Small random diffusion transformers of the kinds that are known, and what is exact for them."""

from __future__ import annotations

import copy
import importlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers: Any = pytest.importorskip("diffusers")

_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_ROTATED = {**_HEADS, "patch_size": 1, "in_channels": 4, "axes_dims_rope": (4, 6, 6)}
_TEXT = {"joint_attention_dim": 8, "pooled_projection_dim": 8}
_SD3: dict[str, Any] = {
    **_TEXT,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "caption_projection_dim": 16,
    "pos_embed_max_size": 8,
    "num_layers": 2,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
_WAN: dict[str, Any] = {
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 1,
    "cross_attn_norm": True,
    "rope_max_seq_len": 16,
}
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Flux": (
        "FluxTransformer2DModel",
        {**_ROTATED, **_TEXT, "num_layers": 1, "num_single_layers": 1},
    ),
    "SD3": ("SD3Transformer2DModel", _SD3),
    "QwenImage": (
        "QwenImageTransformer2DModel",
        {**_ROTATED, "out_channels": 4, "joint_attention_dim": 8, "num_layers": 1},
    ),
    "Wan": ("WanTransformer3DModel", _WAN),
}
KINDS = tuple(_SIZES)


def model(kind: str = "Flux", seed: int = 0, **changes: Any) -> Any:
    """A model in which no parameter is trivial."""
    name, sizes = _SIZES[kind]
    torch.manual_seed(seed)
    made = getattr(diffusers, name)(**{**sizes, **changes})
    with torch.no_grad():
        for label, parameter in made.named_parameters():
            if "norm" in label and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return made.eval().requires_grad_(False)


def inputs(kind: str = "Flux", batch: int = 2) -> dict[str, Any]:
    """Arguments of a call: three tokens of text, six of an image (sixteen of SD3)."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    made: dict[str, Any] = {"encoder_hidden_states": drawn(3, 8), "return_dict": False}
    made["timestep"] = torch.linspace(0.2, 0.8, batch)
    if kind in ("Flux", "SD3"):
        made["pooled_projections"] = drawn(8)
    made["hidden_states"] = drawn(*{"SD3": (4, 8, 8), "Wan": (4, 1, 4, 6)}.get(kind, (6, 4)))
    if kind == "Flux":
        made["img_ids"] = torch.tensor([[0.0, i, j] for i in range(2) for j in range(3)])
        made["txt_ids"] = torch.zeros(3, 3)
    if kind == "QwenImage":
        made["img_shapes"] = [(1, 2, 3)] * batch
    return made


def run(made: Any, arguments: dict[str, Any]) -> Tensor:
    """The model's prediction."""
    with torch.no_grad():
        out: Tensor = made(**arguments)[0]
    return out


def exact(untouched: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The prediction in float64, also of what is computed in float32 whatever the dtype.

    Blocks of Wan round to float32 between their parts.
    """
    wide = copy.deepcopy(untouched).double()
    for module in wide.modules():
        forward = _EXACT.get(type(module).__name__)
        if forward is not None:
            module.forward = types.MethodType(forward, module)
    arguments = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    models = "diffusers.models.transformers.transformer"
    with monkeypatch.context() as patched:
        for name in ("flux.apply_rotary_emb", "qwenimage.apply_rotary_emb_qwen"):
            module_name, function = name.split(".")
            module = importlib.import_module(f"{models}_{module_name}")
            patched.setattr(module, function, _exact_rotation)
        return run(wide, arguments)


def assert_near(out: Tensor, plain: Tensor, roundings: int = 2**6) -> None:
    """Two blocks round fewer times than that on any path, either way; to float32 at best."""
    assert out.dtype == plain.dtype
    unit = max(torch.finfo(dtype).eps for dtype in (plain.dtype, torch.float32))
    allowed = roundings * unit * plain.abs().max()
    error = (out - plain).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def _exact_rms(self: Any, x: Tensor) -> Tensor:
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return out if self.weight is None else out * self.weight


def _exact_layer_norm(self: Any, x: Tensor) -> Tensor:
    out = nn.functional.layer_norm(x.double(), self.normalized_shape, None, None, self.eps)
    return out if self.weight is None else out * self.weight + self.bias


def _exact_rotation(x: Tensor, angles: Any, **_: Any) -> Tensor:
    if isinstance(angles, Tensor):
        turns = angles.to(torch.complex128)
    else:
        turns = torch.complex(*(part.double()[:, ::2] for part in angles))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


_EXACT = {"RMSNorm": _exact_rms, "FP32LayerNorm": _exact_layer_norm}
