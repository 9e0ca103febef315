"""The commands as a user types them: what they show, as JSON and as text, and how they exit."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import torch_ops
from torch_ops import discovery
from torch_ops.cli import main
from torch_ops.declarations import catalogue
from torch_ops.testing.result import Cell, Result


class Shell:
    """Runs ``torch-ops`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        with pytest.raises(SystemExit) as exited:
            main(list(arguments))
        captured = self._capsys.readouterr()
        code = exited.value.code
        return code if isinstance(code, int) else int(code is not None), *captured

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The object on stdout."""
        got, out, err = self(*arguments, "--json")
        assert got == code, err
        return json.loads(out)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def test_info(shell: Shell) -> None:
    found = shell.json("info")
    assert found["platforms"][0] == {
        "device": "cpu",
        "arch": None,
        "index": None,
        "name": torch_ops.Platform.cpu().name,
    }
    backends = {b["name"]: b for b in found["backends"]}
    assert list(backends) == [b.value for b in torch_ops.Backend]
    assert backends["torch"]["usable"] is True
    assert set(backends["torch"]["ops"]) == set(catalogue())
    assert sum(backends["torch"]["states"].values()) == len(catalogue())
    assert set(found["versions"]) >= {"python", "torch", "torch-ops", "triton"}
    _, text, _ = shell("info")
    assert [line for line in text.splitlines() if line and line[0] != " "] == [
        "Platforms",
        "Backends",
        "Versions",
    ]


def unserved(backend: str) -> None:
    for op in torch_ops.registry.ops():
        for spec in torch_ops.registry.get(op):
            if spec.backend == backend:
                torch_ops.registry.unregister(spec)


def test_info_names_what_no_package_provides(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    unserved("aiter")
    monkeypatch.delitem(discovery.packages(), "aiter")
    (alone,) = [b for b in shell.json("info")["backends"] if b["name"] == "aiter"]
    assert not alone["distributions"]
    assert alone["usable"] is False
    assert alone["reasons"] == ["no installed package provides it"]


def test_info_says_why_a_backend_runs_on_no_device_here(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ops.cli.inventory._devices", lambda: ["cpu"])
    unserved("aiter")
    torch_ops.register_kernel(
        torch_ops.KernelSpec(
            "only_registered", "aiter", "math:sqrt", frozenset({torch_ops.Requirement.rocm()})
        )
    )
    backends = {b["name"]: b for b in shell.json("info")["backends"]}
    assert backends["aiter"]["usable"] is False
    assert backends["aiter"]["reasons"] == ["ROCm only (device is 'cpu')"]
    assert backends["torch"]["reasons"] == []


def test_info_remarks_on_a_module_that_serves_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(not backend["remarks"] for backend in shell.json("info")["backends"])
    found = discovery.package(torch_ops.Backend.TORCH)
    assert found is not None
    misspelt = dataclasses.replace(found, modules=found.modules | {"rmsnorm", "_shared"})
    monkeypatch.setattr(discovery, "package", lambda backend: misspelt)
    remarks = {b["name"]: b["remarks"] for b in shell.json("info")["backends"]}
    assert remarks["torch"] == ["module 'rmsnorm' has the name of no op. Did you mean 'rms_norm'?"]


def test_list(shell: Shell) -> None:
    found = {op["name"]: op for op in shell.json("list")["ops"]}
    assert set(found) == set(catalogue())
    for name, declaration in catalogue().items():
        assert found[name]["schema"] == f"{name}{declaration.schema}"
        assert found[name]["doc"] == declaration.doc.splitlines()[0]
    _, text, _ = shell("list")
    assert [line.split()[0] for line in text.splitlines()[2:]] == sorted(catalogue())


def test_list_has_ops_that_are_only_registered(shell: Shell) -> None:
    torch_ops.register_kernel(torch_ops.KernelSpec("only_registered", "torch", "math:sqrt"))
    found = {op["name"]: op for op in shell.json("list")["ops"]}
    assert found["only_registered"] == {
        "name": "only_registered",
        "schema": None,
        "backends": ["torch"],
        "doc": None,
    }


def test_explain_a_call(shell: Shell) -> None:
    call = ("--dtype", "bfloat16", "--shape", "4x64", "--shape", "64", "--arg", "eps=1e-5")
    found = shell.json("explain", "rms_norm", *call, "--device", "cpu")
    assert found["arguments"] == {
        "x": "bfloat16[4, 64]@cpu",
        "weight": "bfloat16[64]@cpu",
        "eps": "1e-05",
    }
    assert (found["chosen"], found["source"]) == ("torch", "declared")
    assert [c["backend"] for c in found["candidates"]][:1] == ["torch"]


def test_explain_shows_the_table_of_explain(shell: Shell) -> None:
    _, text, _ = shell("explain", "rms_norm")
    platform = torch_ops.Platform.cpu()
    assert text == f"{torch_ops.explain('rms_norm', platform=platform)}\n"


PAIRS = """
import torch
from torch_ops import ops

WEIGHT = torch.ones(8)

def model():
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    y = ops.rms_norm(x, WEIGHT)
    return ops.quantize_fp8_per_token(y), ops.quantize_fp8_per_token(ops.silu_and_mul(y))
"""


def test_explain_a_graph(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "pairs.py"
    file.write_text(PAIRS)
    pairs = shell.json("explain", "--graph", f"{file}:model")["pairs"]
    assert [(pair["name"], pair["fused"]) for pair in pairs] == [
        ("rms_norm_quant_fp8", False),
        ("silu_and_mul_quant_fp8", True),
    ]
    assert pairs[0]["place"] == f"{file}:10"
    assert pairs[0]["reason"].endswith("takes what lies between, too")
    _, text, _ = shell("explain", "--graph", f"{file}:model")
    assert text.startswith("2 pairs of calls that one op computes\n")


def test_explain_what_no_graph_is(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "pairs.py"
    file.write_text(f"{PAIRS}\ndef block(x, y=1): ...\n")
    for given, message in (
        (("--graph", f"{file}:block"), "'block' takes x (accepted: one without arguments)"),
        (("rms_norm", "--graph", f"{file}:model"), "name an op, or a function by --graph"),
        (("--graph", f"{tmp_path}/none.py:model"), "names no file"),
        (("--graph", f"{file}:modell"), "no function 'modell'"),
    ):
        code, _, err = shell("explain", *given)
        assert code == 2
        assert message in " ".join(err.replace("│", " ").split())


def test_explain_the_backend_of_a_call(shell: Shell) -> None:
    found = shell.json("explain", "rms_norm", "--backend", "inductor")
    assert (found["chosen"], found["source"]) == ("inductor", "call")


def test_explain_what_would_raise(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = sorted(spec.backend.value for spec in torch_ops.registry.get("rms_norm"))
    monkeypatch.setenv("TORCH_OPS_DISABLE", ",".join(f"rms_norm:{name}" for name in backends))
    torch_ops.refresh()
    found = shell.json("explain", "rms_norm", code=1)
    assert found["chosen"] is None
    assert found["error"]["type"] == "NoBackendError"
    assert {c["backend"]: c["reasons"][0] for c in found["candidates"]} == {
        name: f"disabled by TORCH_OPS_DISABLE=rms_norm:{name}" for name in backends
    }
    code, text, _ = shell("explain", "rms_norm")
    assert code == 1
    assert "would raise NoBackendError: op 'rms_norm' has no backend usable" in text


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms_nrom",), "UnknownOpError: No kernels registered for op 'rms_nrom'"),
        (("rms_norm", "--backend", "acme"), "UnknownBackendError: No 'acme' backend registered"),
    ],
    ids=["op", "backend"],
)
def test_error_is_one_message(
    shell: Shell, arguments: tuple[str, ...], message: str, as_json: tuple[str, ...]
) -> None:
    code, out, err = shell("explain", *arguments, *as_json)
    assert code == 1
    assert err.startswith(message)
    assert "Traceback" not in err
    if as_json:
        error = json.loads(out)["error"]
        assert f"{error['type']}: {error['message']}\n" == err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name an op, or a function by --graph, and not both"),
        (("rms_norm", "--jsn"), "No such option: --jsn"),
        (("rms_norm", "--shape", "axb"), "--shape 'axb' is not a shape"),
        (("rms_norm", "--dtype", "bf17", "--shape", "4"), "--dtype 'bf17' is not a dtype"),
        (("rms_norm", "--device", "cuda:99"), "--device 'cuda:99' is not on this machine"),
        (("rms_norm", "--arg", "eps"), "--arg 'eps' is not of the form NAME=VALUE"),
        (("fused_add_rms_norm", "--shape", "4x8"), "also needs a --shape for each of residual"),
        (("silu_and_mul", "--shape", "4x7"), "op 'silu_and_mul'"),
        (("rms_norm", "--shape", "4", "--dtype", "int32"), "op 'rms_norm': argument 'x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = shell("explain", *arguments)
    assert code == 2
    assert out == ""
    assert message in err


ACME = """
import torch


def available():
    return None
"""
KERNEL = """
import torch


def supports(x):
    return None if x.dtype == torch.float32 else "only float32"


def silu_and_mul(x):
    gate, up = x.contiguous().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up{fault}).contiguous()
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a backend 'acme' that serves silu_and_mul, with a fault or without."""

    def install(fault: str) -> None:
        name = f"cli_acme_{'wrong' if fault else 'right'}"  # a kernel is loaded once by its name
        package, info = tmp_path / name, tmp_path / "cli_acme-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text(ACME)
        (package / "silu_and_mul.py").write_text(KERNEL.format(fault=fault))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cli-acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[torch_ops.backends]\nacme = {name}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        torch_ops.refresh()

    return install


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("", 0), (" * 1.001", 1)], ids=["right", "wrong"])
def test_verify(acme: Callable[[str], None], fault: str, code: int, shell: Shell) -> None:
    """Without an op it proves all that the backend serves; one wrong kernel is exit code 1."""
    acme(fault)
    found = shell.json("verify", "--backend", "acme", code=code)
    assert found["ok"] is (code == 0)
    (result,) = found["results"]
    assert (result["op"], result["backend"]) == ("silu_and_mul", "acme")
    verdicts = {cell["dtype"]: cell["verdict"] for cell in result["cells"]}
    assert verdicts.pop("float32") == ("failed" if code else "passed")
    assert set(verdicts.values()) == {"unsupported"}
    assert shell("explain", "silu_and_mul", "--backend", "acme")[0] == 0


@pytest.mark.parametrize(
    ("options", "isolate"), [((), None), (("--isolate",), True), (("--no-isolate",), False)]
)
def test_verify_isolates(
    options: tuple[str, ...],
    isolate: bool | None,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verify(op: str, backend: str, **given: Any) -> Result:
        sys.stdout.write("said by a kernel\n")  # no part of the JSON
        assert given["isolate"] is isolate
        sys.stdout.write("what a kernel prints is no part of the report")
        return Result(op, backend, "cpu", "dev", 0.0, {}, (Cell("float32", "passed"),))

    monkeypatch.setattr("torch_ops.testing.verify.verify", verify)
    shell.json("verify", "silu_and_mul", "--backend", "torch", *options)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("rms_norm", "--backend", "nope"), 1, "UnknownBackendError: No 'nope' backend"),
        (("--backend", "nope"), 1, "UnknownBackendError: Backend 'nope' serves no op."),
        (("nope", "--backend", "torch"), 1, "UnknownOpError: No kernels registered for op 'nope'"),
        (("rms_norm",), 2, "--backend"),
        (("rms_norm", "--backend", "torch", "--profile", "x"), 2, "--profile 'x' is not known"),
        (("rms_norm", "--backend", "torch", "--device", "x"), 2, "--device 'x' is not a device"),
    ],
    ids=["backend", "backend of all", "op", "no backend", "profile", "device"],
)
def test_verify_refuses(shell: Shell, arguments: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = shell("verify", *arguments)
    assert (got, out) == (code, "")
    assert message in err


def test_verify_without_a_proof(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ops.testing.proof.proof_names", lambda: ["rms_norm"])
    code, _, err = shell("verify", "silu_and_mul", "--backend", "torch")
    assert code == 1
    assert err.startswith("TorchOpsError: No proof for 'silu_and_mul': each needs a module")


class Answer:
    """Stands in for the report of a demo, which takes minutes to make."""

    data: ClassVar = {"answer": "Paris"}

    def __init__(self, ok: bool) -> None:
        self.ok = ok

    def __str__(self) -> str:
        return 'Answer: Paris\n\ndemo: {"answer": "Paris"}'


@pytest.mark.parametrize("ok", [True, False])
def test_demo(ok: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(question: str) -> Answer:
        asked.append(question)
        return Answer(ok)

    monkeypatch.setattr("torch_ops.demo.run", run)
    code, out, _ = shell("demo")
    assert code == (0 if ok else 1)
    assert out.splitlines()[-1] == 'demo: {"answer": "Paris"}'
    assert shell.json("demo", "And of Spain?", code=code) == Answer.data
    assert asked == ["What is the capital of France?", "And of Spain?"]


@pytest.mark.parametrize("ok", [True, False])
def test_serve_demo(ok: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    asked: list[tuple[int, str]] = []

    def serve(settings: Any, device: str) -> Answer:
        asked.append((settings.requests, device))
        return Answer(ok)

    monkeypatch.setattr("torch_ops.demo.serving.serve", serve)
    code, out, _ = shell("serve-demo", "--device", "cpu")
    assert code == (0 if ok else 1)
    assert out.startswith("Answer: Paris")
    arguments = ("--requests", "3", "--device", "cpu")
    assert shell.json("serve-demo", *arguments, code=code) == Answer.data
    assert asked == [(32, "cpu"), (3, "cpu")]
    code, _, err = shell("serve-demo", "--requests", "0")
    assert code == 2
    assert "--requests" in err


def test_help_names_every_command(shell: Shell) -> None:
    code, out, _ = shell("--help")
    assert code == 0
    for command in ("info", "list", "explain", "verify", "demo", "serve-demo"):
        assert f"\n  {command} " in out
        code, text, _ = shell(command, "--help")
        assert code == 0
        assert "--json" in text


def run(*arguments: str, path: Path | None = None, **streams: Any) -> Any:
    """Run the installed command in a process of its own."""
    command = Path(sys.executable).with_name("torch-ops")
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    variables["TERM"] = "xterm-256color"
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(command), *arguments], env=variables, check=False, text=True, **streams
    )


def test_terminal_gets_color_and_a_pipe_does_not() -> None:
    plain = run("explain", "rms_norm", capture_output=True)
    assert plain.returncode == 0, plain.stderr
    assert "\x1b[" not in plain.stdout
    outer, inner = pty.openpty()
    try:
        colored = run("explain", "rms_norm", stdout=inner, stderr=subprocess.PIPE)
        os.close(inner)
        shown = os.read(outer, 65536).decode()
    finally:
        os.close(outer)
    assert colored.returncode == 0, colored.stderr
    assert "\x1b[" in shown
    assert "rms_norm on cpu" in shown


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_extra_is_one_line(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
    )
    done = run("info", path=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"torch-ops: the command line needs the package '{package}', which is not installed: "
        "pip install 'torch-ops[cli]'\n"
    )
    assert done.stdout == ""


def test_absurd_shapes_end_with_a_line(shell: Shell) -> None:
    for shape in ("9" * 30, "1000000000000000x1000", "2147483648x2147483648x2147483648"):
        code, out, err = shell("explain", "silu_and_mul", "--shape", shape)
        assert (code, out) == (2, "")
        assert "--shape" in err
        assert "Traceback" not in err
