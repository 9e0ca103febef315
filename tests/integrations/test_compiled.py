"""Accelerated models in compiled graphs, with the cache made for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import dynamo
from torch_ops.attention import override_attention_backend
from torch_ops.integrations.transformers import accelerate

from . import support
from .support import CACHE, SlotCache, model, tokens, transformers

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "opaque")


class Counter:
    """Counts graphs and gives them to Inductor."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        compiled = compile_fx(graph, inputs)
        self.graphs += 1  # here: Dynamo may start over and give the same graph again
        return compiled


@torch.no_grad()
def decode(
    forward: Callable[..., Any], ids: Tensor, cache: Any, count: int, before: Any = None
) -> list[int]:
    """Greedy tokens of one sequence."""
    out = []
    for number in range(count):
        if before is not None:
            before(number)
        token = forward(input_ids=ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        out.append(int(token))
        ids = token
    return out


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("Llama", marks=pytest.mark.exhaustive),
        pytest.param("Qwen2", marks=pytest.mark.exhaustive),
        pytest.param("Mistral", marks=pytest.mark.exhaustive),
    ],
)
def test_two_graphs_serve_any_length_and_a_swap_compiles_none(family: str) -> None:
    made = model(family)
    expected = support.generate(made, tokens(), 20)[0, 9:].tolist()
    longer = support.generate(made, tokens(1, 14), 6)[0, 14:].tolist()
    accelerate(made)
    torch_ops.fusion.disable("fused_add_rms_norm")  # calls are counted, of each op by itself
    counter = Counter()
    step = torch.compile(made, fullgraph=True, backend=counter)
    prompt = tokens()
    dynamo.mark_dynamic(prompt, 1)

    def cache() -> Any:
        return SlotCache(made.config, 40)

    assert decode(step, prompt, cache(), 20) == expected
    assert counter.graphs == 2
    held = []

    def swap(number: int) -> None:
        if number in (5, 12):
            held.append(override_attention_backend(made, "torch_math", where="*.[02].*"))
        elif number in (9, 16):
            held.pop().undo()

    with torch_ops.trace() as seen:
        assert decode(step, prompt, cache(), 20, swap) == expected
    calls = {(r.op, r.backend.value): r.count for r in seen.records}
    assert calls["attention", "torch_math"] == 2 * 8
    assert calls["attention", "torch_flash"] == 3 * 20 - 2 * 8
    assert calls["rms_norm", "torch"] == 7 * 20
    assert decode(step, tokens(1, 14), cache(), 6) == longer
    assert counter.graphs == 2


@pytest.mark.exhaustive
def test_the_compiled_product_with_one_row_is_as_accurate() -> None:
    made, ids = model("Qwen2"), tokens(1, 1)
    truth, plain = support.exact(made, ids), made(ids).logits
    accelerate(made)
    with torch.no_grad():
        step: Any = torch.compile(made, fullgraph=True)
        logits = step(ids).logits
    support.assert_as_accurate(logits, plain, truth)


@pytest.mark.exhaustive
def test_the_growing_cache_of_transformers_works_compiled() -> None:
    made = model()
    expected = support.generate(made, tokens(), 8)[0, 9:].tolist()
    accelerate(made)
    step = torch.compile(made, fullgraph=True, dynamic=True)
    cache = transformers.DynamicCache(config=made.config)
    assert decode(step, tokens(), cache, 8) == expected


def test_a_slot_cache_gives_what_the_growing_cache_gives() -> None:
    made = model()
    accelerate(made)
    ids = tokens(2)
    expected = made(ids).logits
    cache: Any = SlotCache(made.config, 16, batch_size=2)
    assert cache.get_seq_length() == 0
    first = made(ids[:, :6], **{CACHE: cache}).logits
    rest = made(ids[:, 6:], **{CACHE: cache}).logits
    assert cache.get_seq_length() == 9
    assert (torch.cat((first, rest), 1) - expected).abs().max() <= 1e-5 * expected.abs().max()
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    again = made(ids[:, 6:], **{CACHE: cache}).logits
    assert torch.equal(again, rest)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(made(ids[:, :6], **{CACHE: cache}).logits, first)
    assert cache.get_max_length() == 16


def test_generate_takes_a_slot_cache() -> None:
    made = model()
    expected = support.generate(made, tokens())
    accelerate(made)
    cache: Any = SlotCache(made.config, 32)
    assert torch.equal(support.generate(made, tokens(), **{CACHE: cache}), expected)


def test_a_slot_cache_refuses_what_it_was_not_made_for() -> None:
    made, ids = model(), tokens(2)
    accelerate(made)
    cache: Any = SlotCache(made.config, 16, batch_size=2)
    made(ids, **{CACHE: cache})
    for number in (1, -10):
        with pytest.raises(ValueError, match=rf"SlotCache: crop of {number} .accepted: -9 to 0"):
            cache.crop(number)
    with pytest.raises(ValueError, match=r"received keys of 1 sequences, .* accepted: of 2 seq"):
        made(ids[:1, :1], **{CACHE: cache})
    assert cache.get_seq_length() == 9
    narrow: Any = SlotCache(made.config, 16, batch_size=2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"received keys of .* accepted: of .* torch.b"):
        made(ids, **{CACHE: narrow})
    for arguments in ({"slots": 0}, {"slots": 2, "batch_size": True}):
        with pytest.raises(ValueError, match=r"argument .* is .* .accepted: an int >= 1"):
            SlotCache(made.config, **arguments)
    with pytest.raises(ValueError, match=r"argument .dtype. is torch.int64"):
        SlotCache(made.config, 2, dtype=torch.int64)
