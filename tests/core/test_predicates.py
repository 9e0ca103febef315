"""A predicate answers None or a reason; whatever else it returns is told alike everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import Backend, DeclarationError, discovery, ops

from .conftest import Install
from .toy import Toy

WRONG = ["", 0, False, True, 3, ["no"]]
X = torch.ones(2, 3)


def message(backend: str, answer: object) -> str:
    return (
        f"op 'toy', backend '{backend}': supports() returned {answer!r} (accepted: None where it "
        "serves the call, or a str that says why not)"
    )


@pytest.mark.parametrize("answer", WRONG, ids=repr)
def test_a_choice_with_such_a_predicate_is_refused_alike(answer: Any, toy: Toy) -> None:
    answers = [None]
    toy.serve("torch", 1)
    toy.serve("triton", 3, supports=lambda x, n: answers[0])
    assert toy("triton") == 3
    answers[0] = answer
    with pytest.raises(DeclarationError) as raised:
        toy("triton")
    assert str(raised.value) == message("triton", answer)
    with torch_ops.use_backend("triton"), pytest.raises(DeclarationError, match="toy"):
        toy()
    with pytest.raises(DeclarationError) as selected:
        torch_ops.select_kernel("toy", "triton", args=(X, 1))
    assert str(selected.value) == message("triton", answer)
    explained = torch_ops.explain("toy", X, backend="triton")
    assert explained.chosen is None
    assert isinstance(explained.error, DeclarationError)
    judged = {c.backend.value: c for c in explained.candidates}["triton"]
    assert (judged.usable, judged.reasons) == (False, (message("triton", answer),))
    assert toy.calls == {"triton": 1}


@pytest.mark.parametrize("answer", WRONG, ids=repr)
def test_where_nobody_chose_it_is_a_reason_to_go_on(answer: Any, toy: Toy) -> None:
    toy.serve("torch", 1, supports=lambda x, n: answer)
    toy.serve("inductor", 2)
    with torch_ops.trace() as seen:
        assert toy() == 2
    (record,) = seen.records
    assert dict(record.skipped)["torch"] == message("torch", answer)
    explained = torch_ops.explain("toy", X)
    assert explained.chosen is Backend.INDUCTOR
    assert explained.candidates[0].reasons == (message("torch", answer),)


@pytest.mark.parametrize("answer", ["", 0, False])
def test_availability_is_answered_alike(
    answer: Any, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    monkeypatch.setattr(__import__("torch_ops_acme"), "available", lambda: answer)
    torch_ops.refresh()
    problem = discovery.packages()["acme"].problem
    assert problem is not None
    assert f"available() must return None or a reason, received {answer!r}" in problem
    with pytest.raises(torch_ops.BackendUnavailableError, match="received"):
        ops.rms_norm(X, backend="acme")
