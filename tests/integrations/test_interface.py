"""Attention through transformers' own door, by name or accelerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ops
from torch_ops.integrations.transformers import accelerate
from torch_ops.integrations.transformers.interface import attention_forward
from torch_ops.integrations.transformers.masks import CausalMask

from . import support
from .support import CACHE, model, tokens, transformers

WINDOWED = ("Mistral", {"sliding_window": 4})
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"sliding_window": 4, "layer_types": TYPES, "use_sliding_window": True}
FAMILIES = [
    pytest.param("Llama", {}, id="Llama"),
    pytest.param(*WINDOWED, id="Mistral"),
    pytest.param("Gemma2", {}, id="Gemma2"),
    # Says its window to its mask alone.
    pytest.param("Qwen2Moe", SLIDING, id="Qwen2Moe"),
]


def door(made: Any) -> None:
    made.set_attn_implementation("torch_ops")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """On CPUs only Inductor takes caps; what it would compile is as good a test, in no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


both = pytest.mark.parametrize("put", [door, accelerate])
Put = Callable[[Any], Any]


def ragged(side: str) -> tuple[Tensor, Tensor]:
    """Three prompts of 9, 4 and 1 tokens, padded on a side, and their mask."""
    ids, mask = tokens(3), torch.ones(3, 9, dtype=torch.long)
    for row, length in ((1, 4), (2, 1)):
        place = slice(0, 9 - length) if side == "left" else slice(length, 9)
        mask[row, place] = 0
    return ids.masked_fill(mask == 0, 0), mask


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_the_door_gives_what_eager_attention_gives(family: str, changes: dict[str, Any]) -> None:
    made, ids = model(family, **changes), tokens(2, 11)
    made.set_attn_implementation("eager")
    truth, plain = support.exact(made, ids), made(ids).logits
    greedy = support.generate(made, ids, 6)
    classes = {type(module) for module in made.modules()}
    door(made)
    with torch_ops.trace() as seen:
        support.assert_as_accurate(made(ids).logits, plain, truth)
    assert {r.op: r.count for r in seen.records} == {"attention": support.LAYERS}
    assert torch.equal(support.generate(made, ids, 6), greedy)
    assert {type(module) for module in made.modules()} == classes
    with torch_ops.use_backend(attention="torch"):
        support.assert_as_accurate(made(ids).logits, plain, truth)


@both
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_padding_on_either_side(family: str, changes: dict[str, Any], side: str, put: Put) -> None:
    made, (ids, mask) = model(family, **changes), ragged(side)
    made.set_attn_implementation("eager")
    arguments = {"attention_mask": mask, "position_ids": positions(mask)}
    truth, plain = support.exact(made, ids, **arguments), made(ids, **arguments).logits
    put(made)
    with torch_ops.trace() as seen:
        logits = made(ids, **arguments).logits
    real = mask.bool()
    support.assert_as_accurate(logits[real], plain[real], truth[real])
    ragged_calls = "varlen_attention" if put is door else "attention"
    counts = {r.op: r.count for r in seen.records}
    assert counts[ragged_calls] == support.LAYERS


@both
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_ragged_prompts_are_continued(family: str, changes: dict[str, Any], put: Put) -> None:
    made, (ids, mask) = model(family, **changes), ragged("left")
    made.set_attn_implementation("eager")
    expected = support.generate(made, ids, 6, attention_mask=mask)
    put(made)
    assert torch.equal(support.generate(made, ids, 6, attention_mask=mask), expected)
    if family == "Llama":
        alone = support.generate(made, ids[1:2, 5:], 6)
        assert torch.equal(alone[0, 4:], expected[1, 9:])


@both
def test_padding_on_the_right_stays_a_gap_while_decoding(put: Put) -> None:
    made, (ids, mask) = model(), ragged("right")
    made.set_attn_implementation("eager")
    longer = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)

    def second() -> Tensor:
        cache = made(ids, attention_mask=mask, position_ids=positions(mask))[CACHE]
        step = {"attention_mask": longer, "position_ids": positions(longer)[:, -1:]}
        logits: Tensor = made(ids[:, :1], **step, **{CACHE: cache}).logits
        return logits

    both_at_once = torch.cat((ids, ids[:, :1]), 1)
    arguments = {"attention_mask": longer, "position_ids": positions(longer)}
    truth = support.exact(made, both_at_once, **arguments)[:, -1:]
    plain = second()
    put(made)
    support.assert_as_accurate(second(), plain, truth)


@both
def test_assisted_generation(put: Put) -> None:
    made, assistant, ids = model(), model(seed=1, num_hidden_layers=1), tokens()
    expected = support.generate(made, ids)
    put(made)
    put(assistant)
    assert torch.equal(support.generate(made, ids, assistant_model=assistant), expected)
    itself = support.generate(made, ids, assistant_model=model())  # all that it drafts is taken
    assert torch.equal(itself, expected)


@both
def test_a_prefix_is_used_again(put: Put) -> None:
    made, ids = model(), tokens(1, 12)
    expected = support.generate(made, ids)
    put(made)
    cache = transformers.DynamicCache(config=made.config)
    first = support.generate(made, ids[:, :8], 3, **{CACHE: cache})
    assert cache.get_seq_length() == 10
    cache.crop(-3)
    assert torch.equal(support.generate(made, ids, **{CACHE: cache}), expected)
    assert first.shape == (1, 11)


@both
@pytest.mark.parametrize("padded", [False, True])
def test_beams(put: Put, padded: bool) -> None:
    made, (ids, mask) = model(), ragged("left")
    mask = mask if padded else torch.ones_like(mask)
    expected = support.generate(made, ids, 6, num_beams=3, attention_mask=mask)
    put(made)
    beams = support.generate(made, ids, 6, num_beams=3, attention_mask=mask)
    assert torch.equal(beams, expected)


@both
def test_weights_are_refused(put: Put) -> None:
    made, ids = model(), tokens()
    put(made)
    with pytest.raises(ValueError, match="output_attentions: received True, accepted: False"):
        made(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        support.generate(made, ids, output_attentions=True, return_dict_in_generate=True)


def test_the_door_refuses_what_it_can_not_honor() -> None:
    made, ids = model(attention_dropout=0.5), tokens()
    door(made)
    cache = transformers.StaticCache(config=made.config, max_cache_len=16)
    with pytest.raises(ValueError, match="slots that are not filled"):
        made(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"received a mask of shape \(1, 1, 9, 9\)"):
        made(ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="a pattern that is not causal"):
        made(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match=r"dropout: received 0\.5, accepted: 0\.0"):
        made.train()(ids)


class Caller(nn.Module):
    """Stands in for an attention module."""

    is_causal = False


def test_a_model_is_made_with_it() -> None:
    config = support.config()
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="torch_ops")
    with torch.no_grad(), torch_ops.trace() as seen:
        made.eval()(tokens())
    assert [r.op for r in seen.records] == ["attention"]


@pytest.mark.parametrize("causal", [False, True])
def test_calls_without_a_mask_do_as_sdpa_does(causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    out, weights = attention_forward(Caller(), q, k, v, None, is_causal=causal)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=causal, enable_gqa=True)

    expected, plain = sdpa(q.double(), k.double(), v.double()), sdpa(q, k, v)
    assert weights is None
    support.assert_as_accurate(out.transpose(1, 2), plain, expected)


@pytest.mark.parametrize(
    ("mask", "arguments", "message"),
    [
        (None, {"s_aux": torch.ones(4)}, "s_aux: received one, accepted: None"),
        (None, {"position_bias": torch.ones(4)}, "position_bias: received one"),
        (CausalMask(), {}, "is_causal: received False with a causal mask"),
        (CausalMask(3), {"is_causal": True, "sliding_window": 3}, "sliding_window: received 3 for"),
    ],
)
def test_calls_that_mean_something_else_are_refused(
    mask: CausalMask | None, arguments: dict[str, Any], message: str
) -> None:
    x = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match=message):
        attention_forward(Caller(), x, x, x, mask, **arguments)


def test_attention_that_is_not_causal_keeps_its_mask_to_itself() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(num_hidden_layers=1, vocab_size=support.VOCABULARY, **sizes)
    made = transformers.BertModel(config).eval().requires_grad_(False)
    door(made)
    with pytest.raises(ValueError, match="a pattern that is not causal"):
        made(tokens())
