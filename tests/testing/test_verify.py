"""The runner: verdicts, typed refusals, counts, reports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of, replay
from torch_ops.testing.classes import class_of
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.proof import Law, Pair, Trial
from torch_ops.testing.reproduction import command
from torch_ops.testing.result import Cell, Result
from torch_ops.testing.subject import subject_of
from torch_ops.testing.verify import Progress, verify

Gate = Callable[[Tensor], Tensor]
OP = "silu_and_mul"
reference: Gate = catalogue()[OP].reference


def _supporting(function: Gate, supports: Callable[[Tensor], Any]) -> Gate:
    function.supports = supports  # type: ignore[attr-defined]
    return function


def _copy() -> Gate:
    """A function of its own, to hang a `supports` on."""
    return functools.wraps(reference)(functools.partial(reference))


def _verify(kernel: Any, *dtypes: str, op: str = OP, **options: Any) -> Result:
    return verify(op, kernel, dtypes=dtypes or ("float16",), **options)


def test_a_correct_callable_passes() -> None:
    result = _verify(_copy(), "float16", "float32")
    assert result.ok
    assert [c.dtype for c in result.cells] == ["float32", "float16"]
    for cell in result.cells:
        assert cell.verdict == "passed"
        assert cell.executed >= 100
        assert 0 < cell.ratio <= 1
        assert all(cell.laws.values())
        assert cell.opchecks == 0  # only a registered backend has an operator to check


def test_every_mutant_of_an_op_is_red_in_a_whole_verification() -> None:
    for mutant in itertools.islice(proof_of(OP).mutants, 8):
        result = _verify(mutant.function, "float16", "float32")
        assert not result.ok, mutant.name
        assert result.failures
        assert "FAILED" in str(result)


def test_a_failure_tells_how_to_see_it_again() -> None:
    wrong = lambda x: reference(x) * 2  # noqa: E731
    result = _verify(wrong)
    failure = next(f for f in result.failures if f.phase == "generated")
    assert failure.layer == "bound"
    assert "got" in failure.detail
    assert "oracle" in failure.detail
    assert "ratio" in failure.detail
    told, _, code = failure.again.partition(": ")
    assert told == "where '<lambda>' is made, as kernel"
    with pytest.raises(ViolationError, match=r"\[bound\] out: error is"):
        exec(code, {"kernel": wrong})
    with pytest.raises(ViolationError, match=r"\[bound\] out: error is"):
        replay(failure.spec, wrong)
    assert replay(failure.spec, reference) <= 1


def test_a_function_of_a_script_is_run_again_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "a script.py"
    script.write_text("class Kernels:\n    def wrong(x):\n        return x[..., ::2] * 2\n")
    main = types.ModuleType("__main__")
    exec(script.read_text(), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    wrong = subject_of(main.Kernels.wrong)
    spec = proof_of(OP).small_named("float16")[0].to_json()
    assert command(spec, wrong, torch.device("cpu")).startswith("where 'wrong' is made, as kernel:")
    main.__file__ = str(script)
    code = shlex.split(command(spec, wrong, torch.device("cpu")))[2]
    with pytest.raises(ViolationError, match=r"\[bound\] out: error is"):
        exec(code, {})


def test_hypothesis_shrinks_what_it_draws() -> None:
    def wrong(x: Tensor) -> Tensor:
        out = reference(x)
        return out if out.shape[-1] < 5 else torch.zeros_like(out)

    failure = next(f for f in _verify(wrong).failures if f.phase == "generated")
    spec = json.loads(failure.spec)
    assert spec["dims"]["half"] == 5
    assert spec["operands"]["x"]["layout"] == "contig"
    assert spec["operands"]["x"]["specials"] == []


def test_raising_after_supports_agreed_is_a_failure() -> None:
    def odd(x: Tensor) -> Tensor:
        if x.shape[-1] % 4:
            msg = "width not divisible"
            raise RuntimeError(msg)
        return reference(x)

    result = _verify(odd)
    assert not result.ok
    expected = "supports() accepted the call, which raised RuntimeError: width not divisible"
    assert result.failures[0].layer == "contract"
    assert result.failures[0].detail == expected


def test_a_predicate_that_raises_is_a_failure() -> None:
    result = _verify(_supporting(_copy(), lambda x: {1: ""}[2]))
    found = {(f.layer, f.detail) for f in result.failures}
    assert found == {("contract", "supports() raised KeyError: 2")}


def test_refusing_beforehand_is_not_a_failure() -> None:
    def supports(x: Tensor) -> str | None:
        return f"width {x.shape[-1]} (supported: even halves)" if x.shape[-1] % 4 else None

    result = _verify(_supporting(_copy(), supports))
    assert result.ok
    cell = result.cells[0]
    assert sum(cell.refused.values()) > 10
    (reason,) = cell.refused
    assert re.fullmatch(r"width \d+ \(supported: even halves\)", reason)


def test_a_cell_that_is_refused_whole_is_unsupported_and_proves_nothing() -> None:
    def supports(x: Tensor) -> str | None:
        return "float16 (supported: float32)" if x.dtype == torch.float16 else None

    asked: list[Progress] = []
    both = _verify(_supporting(_copy(), supports), "float32", "float16", progress=asked.append)
    assert {p.phase for p in asked if p.dtype == "float16"} == {
        "covering", "named", "zero", "classes",
    }  # fmt: skip
    assert both.ok
    assert both.cells[1].verdict == "unsupported"
    assert both.cells[1].reason == "float16 (supported: float32)"
    alone = _verify(_supporting(_copy(), supports), "float16")
    assert not alone.ok
    assert "a result without a passed cell is no proof" in str(alone)


def test_too_few_examples_are_red() -> None:
    def supports(x: Tensor) -> str | None:
        return None if x.shape == (500,) else "only one row of 500"

    result = _verify(_supporting(_copy(), supports))
    assert not result.ok
    assert result.cells[0].verdict == "too few"
    assert "examples ran, at least 25 are needed" in result.cells[0].reason


def test_a_law_about_calls_that_are_refused_is_named_with_the_reason() -> None:
    def supports(x: Tensor) -> str | None:
        return "several rows" if x.dim() > 1 and x.shape[0] > 1 else None

    result = _verify(_supporting(_copy(), supports))
    assert result.ok
    (cell,) = result.cells
    assert cell.laws["row_permutation"] == 0
    assert cell.laws_refused == {"row_permutation": "several rows"}
    assert ", 1 refused" in str(result)


def test_a_call_that_a_law_makes_may_be_refused() -> None:
    def supports(x: Tensor) -> str | None:
        return "zeros" if x.numel() and not bool(x.any()) else None

    def refusing(x: Tensor) -> str | None:
        return "no values" if not bool(x[..., x.shape[-1] // 2 :].any()) else supports(x)

    (cell,) = _verify(_supporting(_copy(), refusing)).cells
    assert cell.verdict == "passed"
    assert cell.laws["zero_value"] == 0
    assert cell.laws_refused["zero_value"] == "no values"


def test_a_law_that_never_applied_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Law("never", "says nothing", lambda trial: None)
    proof = proof_of(OP)
    monkeypatch.setattr(
        "torch_ops.testing.verify.proof_of",
        lambda op: dataclasses.replace(proof, laws=(*proof.laws, never)),
    )
    (cell,) = _verify(_copy()).cells
    assert cell.verdict == "too few"
    assert cell.reason == "never checked: never"


def test_a_lost_gpu_ends_the_proof_with_the_example_that_lost_it() -> None:
    def lost(x: Tensor) -> Tensor:
        if x.dtype == torch.float16 and x.shape[-1] > 64:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore text")
        return reference(x)

    result = _verify(lost, "float32", "float16", "bfloat16")
    assert not result.ok
    verdicts = {cell.dtype: cell.verdict for cell in result.cells}
    assert verdicts == {"float32": "passed", "float16": "failed", "bfloat16": "failed"}
    (failure,) = result.failures
    assert failure.phase == "lost"
    assert failure.detail.endswith("AcceleratorError: CUDA error: an illegal memory access")
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        replay(failure.spec, lost)
    assert result.cells[2].reason.startswith("not run: the GPU's context was lost")


def test_a_long_error_is_shortened() -> None:
    def kernel(x: Tensor) -> Tensor:
        raise RuntimeError("note\n" * 100_000 + "the cause")

    (failure, *_) = _verify(kernel).failures
    assert failure.detail.endswith("the cause")
    assert len(failure.detail) < 3000


def test_a_predicate_that_raises_is_red() -> None:
    def supports(x: Tensor) -> str | None:
        return f"width {x.shape[-1] % 4} of {12 // (x.shape[-1] - 2)}"

    result = _verify(_supporting(_copy(), supports))
    assert not result.ok
    failure = result.failures[0]
    assert failure.detail.startswith("supports() raised ZeroDivisionError: ")
    assert json.loads(failure.spec)["dims"]["half"] == 1


def test_supports_answers_none_or_a_reason() -> None:
    with pytest.raises(TypeError, match="supports: received True, accepted None or a reason"):
        _verify(_supporting(_copy(), lambda x: True))


def test_a_kernel_that_is_not_reproducible_is_red() -> None:
    calls = itertools.count()

    def flaky(x: Tensor) -> Tensor:
        out = reference(x)
        return out + 1 if next(calls) == 600 else out

    result = _verify(flaky)
    assert not result.ok
    assert result.failures[0].phase == "generated"
    assert result.failures[0].detail.startswith("not reproducible, the same example failed once: ")


@pytest.mark.parametrize("result", [None, 3, [torch.ones(1)], (torch.ones(1), None)])
def test_an_output_that_is_no_tensor_is_red(result: object) -> None:
    cell = _verify(lambda x: result).cells[0]
    assert cell.verdict == "failed"
    assert "accepted Tensors" in cell.reason


def test_a_mutating_kernel_returns_none() -> None:
    name = "apply_rope_"
    functional = catalogue()["apply_rope"].reference
    cell = _verify(functional, op=name).cells[0]
    assert cell.verdict == "failed"
    assert cell.reason == "a mutating op returns None, received tuple"
    assert _verify(catalogue()[name].reference, op=name).ok


def test_progress_is_told_after_every_example() -> None:
    seen: list[Progress] = []
    result = _verify(_copy(), progress=seen.append)
    phases = [p.phase for p in seen]
    assert list(dict.fromkeys(phases)) == [
        "covering", "named", "zero", "classes", "generated",
    ]  # fmt: skip
    assert all(1 <= p.done <= p.total for p in seen)
    assert {(p.op, p.dtype) for p in seen} == {(OP, "float16")}
    assert len(seen) >= result.cells[0].executed


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Hypothesis tells its seed where it drew nothing that was accepted."""
    refusing = _supporting(_copy(), lambda x: "nothing is served")
    assert _verify(refusing, profile="dev").cells[0].verdict == "unsupported"
    assert capsys.readouterr() == ("", "")


def test_a_result_is_plain_data() -> None:
    result = _verify(_copy())
    data = json.loads(json.dumps(result.to_dict()))
    assert data["ok"] is True
    assert data["op"] == OP
    assert data["cells"][0]["dtype"] == "float16"
    assert data["versions"]["torch"] == torch.__version__
    table = str(result).splitlines()
    assert table[0].startswith(f"{OP} on {OP} (cpu, torch_ops_ci): passed in ")
    assert table[1].split()[:4] == ["dtype", "verdict", "examples", "refused"]
    assert table[2].split()[:2] == ["float16", "passed"]


def test_no_cell_or_only_gray_ones_are_no_success() -> None:
    def result(*cells: Cell) -> Result:
        return Result(OP, "b", "cpu", "dev", 0.0, {}, cells)

    assert not result().ok
    assert not result(Cell("float32", "untestable", "interpreter")).ok
    assert result(Cell("float32", "passed"), Cell("bfloat16", "untestable", "interpreter")).ok
    assert not result(Cell("float32", "passed"), Cell("bfloat16", "too few", "none ran")).ok


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="verify: profile: received 'odd', accepted"):
        verify(OP, reference, profile="odd")
    with pytest.raises(ValueError, match=r"verify: dtypes: received \['int8'\], accepted"):
        _verify(reference, "int8")
    with pytest.raises(LookupError, match="No proof for op 'nope'"):
        verify("nope", reference)
    with pytest.raises(torch_ops.UnknownBackendError, match="No 'nope' backend registered for op"):
        verify(OP, "nope")


def test_a_registered_backend_goes_through_opcheck() -> None:
    result = _verify("torch")
    assert result.ok
    assert result.backend == "torch"
    assert result.versions["torch-ops"] == torch_ops.__version__
    assert result.cells[0].opchecks >= 5
    assert result.cells[0].traced >= 5
    assert result.cells[0].compiled >= 2
    assert _verify(torch_ops.Backend.TORCH).backend == "torch"


def test_replay_of_a_refused_example_says_so() -> None:
    text = proof_of(OP).zero("float16")[0].to_json()
    refusing = _supporting(_copy(), lambda x: "nothing to do")
    with pytest.raises(ValueError, match="refuses the example: nothing to do"):
        replay(text, refusing)
    with pytest.raises(ValueError, match="refuses the example: CUDA only"):
        replay(text, "sgl_kernel", check="traced")
    with pytest.raises(ValueError, match="check: received 'bound', accepted \\['opcheck', "):
        replay(text, "torch", check="bound")
    with pytest.raises(ValueError, match=r"check: received 'traced' for .*, accepted for a ba"):
        replay(text, refusing, check="traced")


def test_a_limit_on_classes_of_calls_is_kept_and_counted() -> None:
    seen = set()

    def kernel(x: Tensor) -> Tensor:
        if x.numel():
            seen.add(class_of({"x": x}))
        return reference(x)

    result = _verify(kernel, max_classes=2)
    cell = result.cells[0]
    assert len(seen) == 2
    assert cell.left_out > 10
    assert cell.left_out + cell.executed >= 100
    assert result.ok


def test_laws_are_heard_in_few_more_classes_where_the_limit_leaves_theirs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def kernel(x: Tensor) -> Tensor:
        if x.numel() and class_of({"x": x}) not in seen:
            seen.append(class_of({"x": x}))
        return reference(x)

    def holds(trial: Trial) -> list[Pair] | None:
        if class_of(trial.args) == seen[0]:
            return None
        twice = trial.run(x=torch.cat([trial.args["x"]] * 2))[0]
        rows = trial.outputs[0].shape[0]
        return [Pair("rows", twice[:rows], trial.outputs[0])]

    law = Law("other_class", "holds in other classes than the first", holds)
    proof = proof_of(OP)
    monkeypatch.setattr(
        "torch_ops.testing.verify.proof_of",
        lambda op: dataclasses.replace(proof, laws=(*proof.laws, law)),
    )
    (cell,) = _verify(kernel, max_classes=1).cells
    assert cell.verdict == "passed", cell
    assert cell.laws["other_class"] == 1
    assert 2 <= len(seen) <= 3
    assert cell.left_out > 100


def test_bits_may_hang_on_the_layout_where_batch_invariance_is_not_promised() -> None:
    def kernel(x: Tensor) -> Tensor:
        if x.is_contiguous():
            return reference(x)
        return reference(x.double()).to(x.dtype)

    (cell,) = _verify(kernel, "float32").cells
    assert cell.verdict == "passed", cell
    assert cell.laws["layout"]
    kernel.batch_invariant = True  # type: ignore[attr-defined]
    (cell,) = _verify(kernel, "float32").cells
    assert cell.verdict == "failed"
    assert {failure.layer for failure in cell.failures} & {"layout", "negated_value"}


def test_classes_of_calls_are_told_by_what_compilers_specialize_on() -> None:
    def of(shape: tuple[int, ...], eps: float = 1.0, window: int = 5) -> object:
        return class_of({"x": torch.empty(shape), "w": None, "eps": eps, "n": window, "f": True})

    assert of((3, 4)) == of((5, 6), 2.0, 7)
    assert of((3, 4)) != of((1, 4))
    assert of((3, 4)) != of((3, 4, 2))
    assert of((3, 4)) != of((3, 4), 0.0)
    assert len({of((3, 4), window=w) for w in (-1, 0, 1, 2, 64)}) == 4


@pytest.mark.parametrize("backend", [None, 3, ["torch"]], ids=repr)
def test_what_is_proven_has_a_name_or_can_be_called(backend: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"verify: backend: received {backend!r}, acc")):
        verify(OP, backend)


@pytest.mark.parametrize("dtypes", ["float32", [torch.float32], [None]], ids=repr)
def test_dtypes_are_a_sequence_of_names(dtypes: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"verify: dtypes: received {dtypes!r}, accept")):
        verify(OP, reference, dtypes=dtypes)


def test_a_gpu_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="verify: device: received 'cuda', accepted: 'cpu'"):
        verify("rms_norm", "torch", device="cuda")
