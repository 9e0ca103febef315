"""How reports are shown: aligned text for a pipe, JSON alone, color on a terminal."""

from __future__ import annotations

import json

import pytest

from torch_ops.cli.output import Report, Table, present
from torch_ops.errors import UnknownOpError

TABLE = Table("Ops", ("op", "backends"), [("rms_norm", "torch, inductor"), ("gate", "")])
REPORT = Report({"ops": ["rms_norm", "gate"]}, ("usable here", TABLE))


def test_plain_table_is_aligned_without_trailing_blanks() -> None:
    assert TABLE.plain() == "Ops\n  op        backends\n  rms_norm  torch, inductor\n  gate"


def test_plain(capsys: pytest.CaptureFixture[str]) -> None:
    present(lambda: REPORT, as_json=False)
    assert capsys.readouterr().out == f"usable here\n\n{TABLE.plain()}\n"


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    present(lambda: REPORT, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == REPORT.data
    assert captured.err == ""


def test_color_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    present(lambda: REPORT, as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b[32musable" in shown
    assert "rms_norm" in shown


def test_red_report_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        present(lambda: Report({"passed": False}, ("failed",), ok=False), as_json=True)
    assert exited.value.code == 1
    assert json.loads(capsys.readouterr().out) == {"passed": False}


@pytest.mark.parametrize("as_json", [False, True])
def test_error_is_a_message_and_exit_code_one(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather() -> Report:
        raise UnknownOpError("No kernels registered for op 'x'", op="x")

    with pytest.raises(SystemExit) as exited:
        present(gather, as_json)
    captured = capsys.readouterr()
    assert exited.value.code == 1
    assert captured.err == "UnknownOpError: No kernels registered for op 'x'\n"
    shown = {"type": "UnknownOpError", "message": "No kernels registered for op 'x'"}
    assert captured.out == "" or json.loads(captured.out) == {"error": shown}
    assert bool(captured.out) is as_json


def test_a_bug_keeps_its_traceback() -> None:
    def gather() -> Report:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        present(gather, as_json=False)


def test_json_has_no_bare_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    present(lambda: Report({"ratio": [float("inf"), 0.5]}, ()), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"ratio": ["inf", 0.5]}
