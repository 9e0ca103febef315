"""The support matrix: what it says, and that its page is the one that the code makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torch_ops
from torch_ops import discovery, support
from torch_ops.cli import main
from torch_ops.declarations import catalogue
from torch_ops.registry import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "SUPPORT.md"


@pytest.fixture(scope="module")
def cells() -> list[support.Cell]:
    return support.matrix(support.evidence())


def of(cells: list[support.Cell], *key: str) -> support.Cell:
    (found,) = [c for c in cells if (c.op, c.backend, c.platform, c.dtype) == key]
    return found


def test_the_page_is_not_stale(cells: list[support.Cell]) -> None:
    made = support.markdown(cells)
    assert PAGE.read_text() == made, "run: torch-ops matrix --markdown > SUPPORT.md"


def test_every_kernel_platform_and_dtype_has_a_cell(cells: list[support.Cell]) -> None:
    built_in = {
        (spec.op, spec.backend.value)
        for op in catalogue()
        for spec in registry.get(op)
        if spec.target.startswith("torch_ops.backends.")
    }
    declined = {(op, p.name) for p in discovery.packages().values() for op in p.declined}
    assert not built_in & declined
    assert {(cell.op, cell.backend) for cell in cells} == built_in | declined
    expected = sum(3 * len(catalogue()[op].dtypes) for op, _ in built_in | declined)
    assert len(cells) == expected
    assert all(cell.evidence for cell in cells)


def test_reasons_are_those_of_the_predicates(cells: list[support.Cell]) -> None:
    refused = of(cells, "rms_norm", "flashinfer", "cuda", "float32")
    assert (refused.usable, refused.evidence) == (
        False,
        "no: x dtype (supported: float16, bfloat16)",
    )
    elsewhere = of(cells, "rms_norm", "sgl_kernel", "rocm", "float16")
    assert (elsewhere.usable, elsewhere.evidence) == (False, "no: CUDA only")


def test_what_is_declined_says_why_where_the_package_runs(cells: list[support.Cell]) -> None:
    key = ("moe_align_block_size", "sgl_kernel")
    shown = of(cells, *key, "cuda", "int32")
    reason = discovery.packages()["sgl_kernel"].declined["moe_align_block_size"]
    assert (shown.usable, shown.evidence) == (False, f"no kernel: {reason}")
    assert of(cells, *key, "rocm", "int32").evidence == "no: CUDA only"


def test_evidence(cells: list[support.Cell]) -> None:
    assert of(cells, "rms_norm", "torch", "cpu", "float64").evidence == "CPU kit"
    interpreted = of(cells, "rms_norm", "triton", "cpu", "float16")
    assert (interpreted.usable, interpreted.evidence) == (False, "interpreter")
    assert of(cells, "rms_norm", "triton", "cpu", "bfloat16").evidence == "unverified"
    assert of(cells, "rms_norm", "triton", "rocm", "bfloat16").evidence == "compiled only"
    proof = json.loads(support.RESULTS.read_text())["proof"]["ops"]["rms_norm"]["triton"]
    shown = of(cells, "rms_norm", "triton", "cuda", "bfloat16").evidence
    assert shown == f"H200 {proof['bfloat16']['date']}"


def test_a_proof_that_is_red_or_absent_is_no_evidence() -> None:
    red = {"": "H200", "rms_norm": {"triton": {"float16": {"verdict": "failed", "date": "1999"}}}}
    cells = support.matrix(red, ["rms_norm"])
    assert of(cells, "rms_norm", "triton", "cuda", "float16").evidence == "failed on the H200 1999"
    assert of(cells, "rms_norm", "torch", "cuda", "float16").evidence == "unverified"


def test_what_no_order_names_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {**catalogue()["rms_norm"].order, "cpu": ("torch",)}
    monkeypatch.setattr(catalogue()["rms_norm"], "order", order)
    found = of(support.matrix({}, ["rms_norm"]), "rms_norm", "inductor", "cpu", "float32")
    assert found.evidence == "CPU kit, on request"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["matrix", *arguments])
        shown = capsys.readouterr()
        return int(exited.value.code or 0), shown.out, shown.err

    code, out, _ = run("--markdown")
    assert (code, out) == (0, PAGE.read_text())
    code, out, _ = run("--json")
    assert code == 0
    assert {cell["op"] for cell in json.loads(out)["cells"]} == set(catalogue())
    path = tmp_path / "results.json"
    path.write_text("{}")
    code, _, err = run("--evidence", str(path))
    assert code == 1
    assert f"TorchOpsError: evidence {path} can't be read: KeyError: 'proof'" in err
    with pytest.raises(torch_ops.TorchOpsError, match="FileNotFoundError"):
        support.evidence(tmp_path / "absent.json")
