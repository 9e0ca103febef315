"""The public surface equals ``public_api.txt``: names both ways, parameters, kinds, defaults."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_ops

STUB = ast.parse(Path(__file__).with_name("public_api.txt").read_text())
MODULES = {
    "torch_ops": "torch_ops",
    "torch_ops_errors": "torch_ops.errors",
    "torch_ops_fusion": "torch_ops.fusion",
    "torch_ops_attention": "torch_ops.attention",
    "torch_ops_integrations_transformers": "torch_ops.integrations.transformers",
}
# Modules that are reached as attributes of the package.
SUBMODULES = {"errors", "ops"}
Function = ast.FunctionDef


SECTIONS = {MODULES[s.name]: s for s in STUB.body if isinstance(s, ast.ClassDef)}


def stubbed(section: ast.ClassDef) -> dict[str, ast.stmt]:
    """Public names of a section of the stub with their nodes."""
    names: dict[str, ast.stmt] = {}
    for node in section.body:
        if isinstance(node, ast.ClassDef | Function):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


def functions() -> Iterator[Any]:
    """Every function and method of the stub: its module, its path in there, its node."""
    for module, section in SECTIONS.items():
        for name, node in stubbed(section).items():
            where = f"{module}.{name}"
            if isinstance(node, Function):
                yield pytest.param(module, (name,), node, id=where)
            elif isinstance(node, ast.ClassDef):
                for inner, method in stubbed(node).items():
                    if isinstance(method, Function):
                        yield pytest.param(module, (name, inner), method, id=f"{where}.{inner}")


def stub_parameters(node: Function) -> list[tuple[str, str, str]]:
    """Name, kind and default (as source, ``""`` for none) of each parameter, without self."""
    args = node.args
    positional = [
        *((a, "POSITIONAL_ONLY") for a in args.posonlyargs),
        *((a, "POSITIONAL_OR_KEYWORD") for a in args.args),
    ]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    rows = [
        (a.arg, kind, _source(default))
        for (a, kind), default in zip(positional, [*defaults, *args.defaults], strict=True)
    ]
    if args.vararg:
        rows.append((args.vararg.arg, "VAR_POSITIONAL", ""))
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        rows.append((a.arg, "KEYWORD_ONLY", _source(default)))
    if args.kwarg:
        rows.append((args.kwarg.arg, "VAR_KEYWORD", ""))
    return [row for row in rows if row[0] not in ("self", "cls")]


def _source(default: ast.expr | None) -> str:
    return "" if default is None else ast.unparse(default)


def real_parameters(function: Any, stub: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    rows = []
    open_defaults = {name for name, _, default in stub if default == "..."}
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is p.empty else repr(p.default)
        if p.name in open_defaults and default:
            default = "..."
        rows.append((p.name, p.kind.name, default))
    return [row for row in rows if row[0] not in ("self", "cls")]


@pytest.mark.parametrize(("module", "path", "node"), list(functions()))
def test_signature(module: str, path: tuple[str, ...], node: Function) -> None:
    real: Any = importlib.import_module(module)
    for name in path:
        real = getattr(real, name)
    stub = stub_parameters(node)
    assert real_parameters(real, stub) == stub


@pytest.mark.parametrize("name", SECTIONS)
def test_names_are_exported(name: str) -> None:
    """Each promised name is in ``__all__`` and there; the module has nothing beyond them."""
    module = importlib.import_module(name)
    promised, exported = set(stubbed(SECTIONS[name])), set(module.__all__)
    if module is torch_ops:
        promised |= {*torch_ops.errors.__all__, *SUBMODULES}
    assert exported == promised
    assert [name for name in exported if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", SECTIONS)
def test_enum_members(name: str) -> None:
    module = importlib.import_module(name)
    for node in stubbed(SECTIONS[name]).values():
        if isinstance(node, ast.ClassDef):
            real = getattr(module, node.name)
            for member in filter(str.isupper, stubbed(node)):
                assert getattr(real, member) is real(member.lower())


def test_error_bases() -> None:
    for name, node in stubbed(SECTIONS["torch_ops.errors"]).items():
        assert isinstance(node, ast.ClassDef)
        real = getattr(torch_ops, name)
        assert real is getattr(torch_ops.errors, name)
        ancestors = {base.__name__ for base in real.__mro__}
        assert {ast.unparse(base) for base in node.bases} <= ancestors


def test_ops_holds_callables_only() -> None:
    names = [name for name in dir(torch_ops.ops) if not name.startswith("_")]
    assert names
    assert [name for name in names if not callable(getattr(torch_ops.ops, name))] == []


@pytest.mark.parametrize("name", ["attention", "integrations.transformers", "testing", "cli"])
def test_submodule_imports_alone(name: str) -> None:
    """No import order is needed, and none hides a cycle."""
    done = subprocess.run(
        [sys.executable, "-c", f"import torch_ops.{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_distribution() -> None:
    assert torch_ops.__version__ == importlib.metadata.version("torch-ops")
    assert "__version__" not in vars(torch_ops)  # read where it is asked for, not at import
