"""Examples that these backends take, and the kit's judgement of them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_ops import kernels
from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.proof import proof_of
from torch_ops.testing.proofs._latents import FORM as LATENTS
from torch_ops.testing.proofs._paged import DECODE, PREFILL
from torch_ops.testing.proofs._ragged import PACKED, sized, spec_of
from torch_ops.testing.proofs._scaled_mm import plain
from torch_ops.testing.search import covering_rows
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.subject import Subject, subject_of

NORM_WIDTHS = (1, 3, 8, 33, 96, 128, 769, 1000, 1024, 4096, 5125, 8192, 16384)
ROWS = ("contig", "qkv_split", "unbind", "slice_offset", "int64_stride")
REGIMES = ("normal", "rows", "mean_shift", "tiny", "spiky", "zeros")
GATED_WIDTHS = (4, 8, 64, 512, 5128, 14336)
HEADS = ((1, 1), (2, 2), (4, 1), (6, 2), (8, 8), (7, 1), (16, 1))
ROTATED = (
    (64, 64), (64, 32), (128, 128), (128, 32), (128, 96), (256, 256), (512, 128), (80, 80),
    (80, 32), (96, 64), (192, 128), (32, 32), (16, 16), (40, 32),
)  # fmt: skip
LENGTHS = ((1, 1), (1, 257), (7, 130), (64, 64), (129, 129), (33, 1000), (9, 4), (130, 7))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
WINDOWS = (-1, 0, 1, 64)
SEQUENCES = (
    ([1, 1], [40, 17]), ([5, 0, 3], [30, 4, 3]), ([1, 1, 1], [300, 1, 16]), ([70, 9], [90, 130]),
)  # fmt: skip


def specs(op: str, dtype: str) -> Iterator[Spec]:
    """Give examples of an op whose kernels read rows in vectors of 16 bytes."""
    return _MAKERS[op](op, dtype)


def _norms(op: str, dtype: str) -> Iterator[Spec]:
    for i, hidden in enumerate(NORM_WIDTHS):
        for j, layout in enumerate(ROWS):
            tokens = 1 if layout == "int64_stride" else (1, 3, 16)[(i + j) % 3]
            regime = REGIMES[(i + j) % len(REGIMES)]
            operands = {"x": Operand(dtype, layout, regime), "weight": Operand(dtype)}
            dims = {"tokens": tokens, "hidden": hidden}
            yield Spec.of(op, dims, operands, {"eps": 1e-6}, seed=i)
    for dims in ({"hidden": 4096}, {"batch": 2, "tokens": 3, "hidden": 768}):
        operands = {"x": Operand(dtype), "weight": Operand(dtype)}
        yield Spec.of(op, dims, operands, {"eps": 1e-6})


def _layer_norms(op: str, dtype: str) -> Iterator[Spec]:
    for i, hidden in enumerate((*NORM_WIDTHS, 49152)):
        for j, layout in enumerate(("contig", "slice_offset")):
            operands = {
                "x": Operand(dtype, layout, REGIMES[(i + j) % len(REGIMES)]),
                "weight": Operand("float32", regime="near_one"),
                "bias": Operand("float32"),
            }
            dims = {"tokens": (1, 3, 16)[(i + j) % 3], "hidden": hidden}
            yield Spec.of(op, dims, operands, {"eps": 1e-6}, seed=i)


def _fused_adds(op: str, dtype: str) -> Iterator[Spec]:
    for i, hidden in enumerate(NORM_WIDTHS):
        operands = {
            "x": Operand(dtype, "contig", REGIMES[i % len(REGIMES)]),
            "residual": Operand(dtype),
            "weight": Operand(dtype, regime="near_one"),
        }
        dims = {"tokens": (1, 3, 16)[i % 3], "hidden": hidden}
        yield Spec.of(op, dims, operands, {"eps": 1e-6}, seed=i)


def _gates(op: str, dtype: str) -> Iterator[Spec]:
    for i, half in enumerate(GATED_WIDTHS):
        for j, layout in enumerate(("contig", "slice_offset")):
            for regime in ("normal", "spiky", "rows"):
                dims = {"tokens": (1, 7, 33)[(i + j) % 3], "half": half}
                yield Spec.of(op, dims, {"x": Operand(dtype, layout, regime)}, {}, seed=i)


def _ropes(op: str, dtype: str) -> Iterator[Spec]:
    layouts = ("contig", "qkv_split", "unbind")
    for i, (head_dim, rotary_dim) in enumerate(ROTATED):
        for neox in (True, False):
            heads, kv_heads = HEADS[i % len(HEADS)]
            operands = {
                "q": Operand(dtype, layouts[i % 3]),
                "k": Operand(dtype, layouts[i // 3 % 3]),
                "cos_sin_cache": Operand("float32", regime="unit_circle"),
                "positions": Operand(("int64", "int32")[i % 2], regime="index", high=300),
            }
            dims = {
                "tokens": (1, 5, 33)[i % 3], "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim, "rotary_dim": rotary_dim, "max_position": 300,
            }  # fmt: skip
            yield Spec.of(op, dims, operands, {"is_neox": neox}, seed=i)


def _merges(op: str, dtype: str) -> Iterator[Spec]:
    for i, head_dim in enumerate((64, 128, 256, 512)):
        operands = {name: Operand(dtype) for name in ("v_a", "v_b")}
        operands |= {name: Operand("float32") for name in ("s_a", "s_b")}
        yield Spec.of(op, {"tokens": 5, "heads": 4, "head_dim": head_dim}, operands, {}, seed=i)


def _attentions(op: str, dtype: str) -> Iterator[Spec]:
    layouts = ("contig", "qkv_split", "unbind")
    count = 0
    for i, (queries, keys) in enumerate(LENGTHS):
        for j, group in enumerate(GROUPS):
            count += 1
            head_dim = (64, 128, 256)[count % 3]
            batch = (1, 1, 2, 3)[(i + j) % 4]
            layout = layouts[count % 3] if batch == 1 else "contig"
            operands = {name: Operand(dtype, layout) for name in ("q", "k", "v")}
            dims = {
                "batch": batch, "queries": queries, "keys": keys, "kv_heads": (1, 2)[j % 2],
                "group": group, "head_dim": head_dim,
            }  # fmt: skip
            params = {
                "is_causal": bool((i + j) % 2), "scale": (None, 0.25)[count % 2],
                "window_left": WINDOWS[(i + 2 * j) % 4], "logits_soft_cap": 0.0,
            }  # fmt: skip
            yield Spec.of(op, dims, operands, params, seed=count)


def _sequences(op: str, dtype: str) -> Iterator[Spec]:
    form = {"paged_decode": DECODE, "paged_prefill": PREFILL}.get(op, PACKED)
    for i, (queries, keys) in enumerate(SEQUENCES):
        sizes = {
            "kv_heads": (1, 2)[i % 2], "group": GROUPS[i], "head_dim": (64, 128, 256)[i % 3],
            "page_size": (16, 64)[i % 2], "pad": 0, "spare": 2,
        }  # fmt: skip
        dims = {
            n: size
            for n, size in sized(queries, keys, **sizes).items()
            if op != "paged_decode" or not n.startswith("qo")
        }
        looks = {name: Operand(dtype) for name in ("q", form.keys, form.values)}
        yield spec_of(op, form, dims, looks, {"is_causal": bool(i % 2)}, seed=i)


def _latents(op: str, dtype: str) -> Iterator[Spec]:
    for i, (heads, keys) in enumerate(((1, [9]), (16, [70, 0, 3]), (70, [33, 1]), (128, [5]))):
        sizes = {"heads": heads, "latent": 512, "rope": 64, "page_size": (16, 64)[i % 2]}
        dims = sized([], keys, pad=i % 2, spare=2, **sizes)
        scale = (0.125, 0.0625)[i % 2]
        yield spec_of(op, LATENTS, dims, {"q_nope": Operand(dtype)}, {"scale": scale}, seed=i)


def _products(op: str, dtype: str) -> Iterator[Spec]:
    kind = "int8" if op.endswith("int8") else "float8_e4m3fn"
    sizes = ((1, 8, 16), (3, 24, 48), (16, 64, 128), (33, 136, 64), (129, 16, 272), (1, 512, 256))
    for i, (m, n, k) in enumerate(sizes):
        yield plain(op, kind, {"m": m, "n": n, "k": k}, dtype, bias=bool(i % 2))


def _appends(op: str, dtype: str) -> Iterator[Spec]:
    yield from proof_of(op).named(dtype).values()


def _routings(op: str, dtype: str) -> Iterator[Spec]:
    for seed, (experts, k) in enumerate(((1, 1), (8, 2), (64, 6), (128, 8), (160, 6), (512, 10))):
        for i, layout in enumerate(("contig", "row_stride", "misalign", "transposed")):
            dims = {"tokens": 1 + 6 * i, "experts": experts}
            params = {"k": k, "renormalize": bool((i + seed) % 2)}
            yield Spec.of(op, dims, {"logits": Operand(dtype, layout)}, params, seed)


def _groups(op: str, dtype: str) -> Iterator[Spec]:
    for i, size in enumerate((16, 32, 64, 128)):
        for j, groups in enumerate((1, 3, 32)):
            operands = {"x": Operand(dtype, "contig", REGIMES[(i + j) % len(REGIMES)])}
            dims = {"tokens": (1, 3, 16)[(i + j) % 3], "groups": groups, "size": size}
            yield Spec.of(op, dims, operands, {"group_size": size}, seed=i)


def _small(op: str, dtype: str) -> Iterator[Spec]:
    yield from proof_of(op).small_named(dtype)


def attention(dtype: str = "bfloat16", **dims: int) -> Spec:
    """Give one causal example."""
    operands = {name: Operand(dtype) for name in ("q", "k", "v")}
    params = {"is_causal": True, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    return Spec.of("attention", dims, operands, params)


_MAKERS: dict[str, Callable[[str, str], Iterator[Spec]]] = {
    "rms_norm": _norms,
    "gemma_rms_norm": _norms,
    "layer_norm": _layer_norms,
    "fused_add_rms_norm": _fused_adds,
    "gemma_fused_add_rms_norm": _fused_adds,
    "fused_add_rms_norm_": _fused_adds,
    "silu_and_mul": _gates,
    "gelu_and_mul": _gates,
    "gelu_tanh_and_mul": _gates,
    "apply_rope": _ropes,
    "apply_rope_": _ropes,
    "merge_state": _merges,
    "attention": _attentions,
    "attention_backward": _small,
    "attention_with_lse": _attentions,
    "varlen_attention": _sequences,
    "varlen_attention_with_lse": _sequences,
    "paged_prefill": _sequences,
    "paged_decode": _sequences,
    "mla_decode": _latents,
    "append_paged_kv_": _appends,
    "apply_rope_append_paged_kv_": _small,
    "min_p_filter": _small,
    "sample_top_k_top_p": _small,
    "top_k_renorm_probs": _small,
    "top_p_renorm_probs": _small,
    "scaled_mm_fp8": _products,
    "scaled_mm_int8": _products,
    "fused_add_rms_norm_quant_fp8": _small,
    "fused_add_rms_norm_quant_fp8_per_group": _small,
    "fused_add_rms_norm_quant_fp8_per_tensor": _small,
    "quantize_fp8_per_group": _groups,
    "quantize_fp8_per_tensor": _small,
    "quantize_fp8_per_token": _small,
    "quantize_int8_per_token": _small,
    "rms_norm_quant_fp8": _small,
    "rms_norm_quant_fp8_per_group": _small,
    "rms_norm_quant_fp8_per_tensor": _small,
    "silu_and_mul_quant_fp8": _small,
    "silu_and_mul_quant_fp8_per_group": _small,
    "silu_and_mul_quant_fp8_per_tensor": _small,
    "silu_and_mul_backward": _small,
    "rms_norm_backward": _small,
    "layer_norm_backward": _small,
    "gelu_and_mul_backward": _small,
    "gelu_tanh_and_mul_backward": _small,
    "fused_experts": _small,
    "moe_align_block_size": _small,
    "topk_softmax": _routings,
}


def covering(op: str, dtype: str) -> list[Spec]:
    """Give the kit's examples of every pair of choices."""
    return [spec for spec in covering_rows(op) if spec.dtype == dtype]


def special(op: str, dtype: str) -> list[Spec]:
    """Give the kit's examples of size zero, and those with NaN and infinities."""
    proof = proof_of(op)
    return [*proof.zero(dtype), *proof.classes(dtype)]


def part(backend: str, name: str) -> Any:
    """Import a module of a backend."""
    return importlib.import_module(f"torch_ops.backends.{backend}.{name}")


def loaded(op: str, backend: str) -> kernels.Kernel:
    """Load a backend's kernel, which imports nothing of the package that it wraps."""
    return kernels.load(registry.find(op, backend))


def refusal(op: str, backend: str, *args: Any) -> str | None:
    """Give why a backend doesn't take a call, or None."""
    supports = loaded(op, backend).supports
    assert supports is not None
    return supports(*args)


def direct(op: str, backend: str, *, judged: bool = True) -> Subject:
    """Make a subject of a backend's own function; unless it is judged, of calls it refuses too."""

    def refuses(args: Sequence[Any]) -> str | None:
        return refusal(op, backend, *args) if judged else None

    return Subject(
        backend, loaded(op, backend).function, refuses, lambda dtype: None, registered=False
    )


def function(call: Callable[..., Any]) -> Subject:
    """Make a subject of any callable with an op's signature."""
    return subject_of(call)


def examine(
    subject: Subject,
    op: str,
    examples: Sequence[Spec],
    *,
    device: torch.device | str = "cpu",
    laws: bool = True,
    **contract: Any,
) -> Tally:
    """Run examples with the op's contract, or one that differs from it; raises what is wrong."""
    promised = catalogue()[op].contract
    judge = Examiner(
        subject, proof_of(op), dataclasses.replace(promised, **contract), torch.device(device)
    )
    tally = Tally()
    for spec in examples:
        judge(spec, tally, with_laws=laws)
    return tally
