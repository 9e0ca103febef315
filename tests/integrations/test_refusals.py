"""What the accelerated attention can't honor is refused, never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ops.integrations.transformers import accelerate

from . import support
from .support import CACHE, POSITIONS, SlotCache, model, tokens, transformers


@pytest.fixture
def made() -> torch.nn.Module:
    made: torch.nn.Module = model()
    accelerate(made)
    return made


def test_a_mask_of_ones_changes_nothing(made: torch.nn.Module) -> None:
    ids = tokens(2)
    logits = made(ids).logits
    assert torch.equal(made(ids, attention_mask=torch.ones_like(ids)).logits, logits)


def test_a_gap_within_a_window_is_refused() -> None:
    """The model's own mask counts padding as keys of the window."""
    made = model("Mistral", sliding_window=4)
    accelerate(made)
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    cache = made(ids, attention_mask=mask)[CACHE]
    with pytest.raises(ValueError, match="padding between the tokens of a sequence"):
        made(ids[:, :1], attention_mask=torch.cat((mask, mask[:, :1]), 1), **{CACHE: cache})


def test_a_mask_of_the_new_tokens_alone_is_refused(made: torch.nn.Module) -> None:
    ids = tokens(2)
    cache = made(ids)[CACHE]
    with pytest.raises(ValueError, match="received one for 1 tokens, accepted: for all 10"):
        made(ids[:, :1], attention_mask=torch.ones(2, 1), **{CACHE: cache})


def test_a_mask_of_four_dimensions_is_refused(made: torch.nn.Module) -> None:
    ids = tokens()
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"received a mask of shape \(1, 1, 9, 9\)"):
        made(ids, attention_mask=mask)


@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 1, 9)])
def test_masks_of_other_shapes_are_refused(made: torch.nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask: received shape .*accepted: \[2, 9\]"):
        made(tokens(2), attention_mask=torch.ones(shape))


def test_one_mask_serves_all_rows(made: torch.nn.Module) -> None:
    ids, mask = tokens(2), torch.ones(1, 9)
    mask[0, 0] = 0
    expected = made(ids, attention_mask=mask.expand(2, -1)).logits
    assert torch.equal(made(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(9)[None] - 1, "received some below 0 or from 64 on, accepted: 0 to 63"),
        (torch.arange(9)[None] + 56, "received some below 0 or from 64 on, accepted: 0 to 63"),
        (torch.arange(9.0)[None], "received torch.float32, accepted: torch.int64"),
        (torch.arange(8)[None], r"received shape \[1, 8\], accepted: \[2, 9\] or \[1, 9\]"),
    ],
)
def test_positions_out_of_the_table_are_refused(
    made: torch.nn.Module, positions: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=f"position_ids: {message}"):
        made(tokens(2), position_ids=positions)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_refuses_positions_when_it_runs() -> None:
    made = model(num_hidden_layers=1)
    accelerate(made)
    step: Any = torch.compile(made, fullgraph=True, backend="eager")
    positions = torch.arange(9)[None]
    with torch.no_grad():
        step(tokens(), position_ids=positions + 1)
        with pytest.raises(RuntimeError, match="position_ids: received some below 0"):
            step(tokens(), position_ids=positions - 1)


def test_what_is_captured_refuses_positions_when_it_runs(
    made: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ops.once.capturing", lambda: True)  # nothing may be waited for then
    with pytest.raises(RuntimeError, match="position_ids: received some below 0"):
        made(tokens(), position_ids=torch.arange(9)[None] - 1)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_nothing_in_gives_nothing(made: torch.nn.Module, shape: tuple[int, int]) -> None:
    assert made(torch.zeros(shape, dtype=torch.long)).logits.shape == (*shape, support.VOCABULARY)


def test_packed_sequences_are_refused(made: torch.nn.Module) -> None:
    ids = tokens()
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="a pattern that is not causal"):
        made(ids, position_ids=packed, use_cache=False)


def test_static_caches_are_refused(made: torch.nn.Module) -> None:
    cache = transformers.StaticCache(config=made.config, max_cache_len=16)
    with pytest.raises(ValueError, match="slots that are not filled"):
        made(tokens(), **{CACHE: cache})
    with pytest.raises(ValueError, match="slots that are not filled"):
        support.generate(made, tokens(), cache_implementation="static")


def test_texts_beyond_the_table_are_refused(made: torch.nn.Module) -> None:
    made(tokens(1, POSITIONS))
    with pytest.raises(ValueError, match=f"received {POSITIONS + 1} tokens, accepted: at most"):
        made(tokens(1, POSITIONS + 1))


@pytest.mark.exhaustive
def test_compiled_code_refuses_padding_when_it_runs(
    made: torch.nn.Module, fresh_dynamo: None
) -> None:
    ids = tokens(2)
    step = torch.compile(made, fullgraph=True)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        assert torch.equal(step(ids, attention_mask=mask).logits, step(ids).logits)
        mask[0, 0] = 0
        with pytest.raises(RuntimeError, match="attention_mask: received one with padding"):
            step(ids, attention_mask=mask)


def test_more_tokens_than_slots_are_refused(made: torch.nn.Module) -> None:
    cache = SlotCache(made.config, 10)
    made(tokens(), **{CACHE: cache})
    made(tokens(1, 1), **{CACHE: cache})
    with pytest.raises(ValueError, match="SlotCache: received 11 tokens in all"):
        made(tokens(1, 1), **{CACHE: cache})
