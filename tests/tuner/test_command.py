"""``torch-ops tune``: from shapes to a table that decides calls."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import tuning
from torch_ops.cli import main
from torch_ops.cli import tuning as tuning_command
from torch_ops.testing.compare import DeviceLostError
from torch_ops.testing.spec import Spec
from torch_ops.tuner import measure


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command."""
    with pytest.raises(SystemExit) as exited:
        main(["tune", *arguments, "--device", "cpu"])
    shown = capsys.readouterr()
    return int(exited.value.code or 0), shown.out, shown.err


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of small calls; Inductor, which would take seconds to compile, is disabled."""
    monkeypatch.setenv("TORCH_OPS_DISABLE", "inductor")
    torch_ops.refresh()
    path = tmp_path / "shapes.json"
    path.write_text(
        json.dumps(
            {
                "rms_norm": [{"tokens": 3, "hidden": 64}, {"tokens": 4, "hidden": 64}],
                "append_paged_kv_": [{"tokens": 2, "pages": 4, "kv_heads": 2, "head_dim": 8}],
            }
        )
    )
    return path


def test_a_real_table_of_small_calls(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured, written, read, and followed by a call of the bucket."""
    saved = tmp_path / "table.json"
    code, out, err = run(capsys, "--shapes", str(shapes), "--save", str(saved), "--json")
    assert code == 0, err
    assert "tune rms_norm ..." in err
    data = json.loads(saved.read_text())
    assert data == json.loads(out)
    assert {op: len(rows) for op, rows in data["rows"].items()} == {
        "append_paged_kv_": 1,
        "rms_norm": 1,
    }
    assert data["device"] == tuning.device_name(torch_ops.Platform.cpu())
    torch_ops.load_tuning_table(saved)
    found = torch_ops.explain("rms_norm", torch.ones(4, 64), torch.ones(64))
    assert (found.chosen, found.source) == (torch_ops.Backend.TORCH, "tuned")
    assert found.row is not None
    assert 0 < found.row.us["torch"] < 1e6


def fake(us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(spec: Any, bucket: str, device: Any, timer: Any) -> tuning.Row:
        return tuning.Row(bucket, {"torch": us}, {"triton": "wrong"})

    monkeypatch.setattr(measure, "measure", measured)


def test_rows_are_added_to_a_table(
    shapes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = tmp_path / "table.json"
    command = functools.partial(run, capsys, "--save", str(saved), "--shapes")
    monkeypatch.setitem(tuning_command.LIMIT, "cpu", 1 << 24)
    fake(3.0, monkeypatch)
    assert command(str(shapes))[0] == 0
    fake(2.0, monkeypatch)
    code, out, _ = command("qwen3", "rms_norm", "--dtype", "float32", "--dtype", "bfloat16")
    assert code == 0
    assert "  rms_norm  torch    torch 2  " in out
    assert "triton: wrong" in out
    rows = tuning.read(saved).rows
    assert [row.us["torch"] for row in rows["append_paged_kv_"].values()] == [3.0]
    assert {row.us["torch"] for row in rows["rms_norm"].values()} == {2.0, 3.0}
    assert len(rows["rms_norm"]) == 1 + 2 * 2 * 15 - 2  # of 2048 columns two are over the limit


def test_a_table_of_another_device_is_left_alone(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "table.json"
    before = json.dumps(tuning.written("NVIDIA H200", {}))
    saved.write_text(before)
    code, _, err = run(capsys, "--shapes", str(shapes), "--save", str(saved))
    assert code == 1
    assert "there is a table of device 'NVIDIA H200' (here: " in err
    assert saved.read_text() == before


def test_a_lost_gpu_ends_it_with_what_was_running(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise DeviceLostError("illegal access")

    monkeypatch.setattr(measure, "measure", lost)
    code, _, err = run(capsys, "rms_norm", "--shapes", str(shapes))
    assert code == 1
    assert "tune rms_norm, x float32[4, 64], weight float32[64]: the GPU was lost: illegal" in err


def test_calls_that_cannot_be_measured_are_listed(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(spec: Spec, bucket: str, device: Any, timer: Any) -> tuning.Row:
        if spec.op == "rms_norm":
            raise torch.OutOfMemoryError("no 9 GiB")
        return tuning.Row(bucket, {}, {"torch": "wrong"})

    monkeypatch.setattr(measure, "measure", measured)
    code, out, _ = run(capsys, "--shapes", str(shapes))
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("not measured: ")]
    assert [line.rpartition(": ")[2] for line in lines] == ["'wrong'}", "no 9 GiB"]
    assert "append_paged_kv_ k float32[2, 2, 8]" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("rms_nrom",), "No kernels registered for op 'rms_nrom'", 1),
        (("rms_norm", "--shapes", "llama9"), "shapes 'llama9' are neither a file nor a model", 1),
        (("--dtype", "bfloat"), "is not a dtype of torch", 2),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    message: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    got, _, err = run(capsys, *arguments)
    assert got == code
    assert message in " ".join(err.split())
