"""The public surface equals ``public_api.txt``: names both ways, parameters, kinds, defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torch_ops

STUB = ast.parse(Path(__file__).with_name("public_api.txt").read_text())
MODULES = {
    "torch_ops": "torch_ops",
    "torch_ops_errors": "torch_ops.errors",
    "torch_ops_attention": "torch_ops.attention",
    "torch_ops_integrations_transformers": "torch_ops.integrations.transformers",
}
# Modules that are reached as attributes of the package.
SUBMODULES = {"attention", "errors", "ops"}

Function = ast.FunctionDef


def sections() -> Iterator[tuple[ModuleType, ast.ClassDef]]:
    for section in STUB.body:
        assert isinstance(section, ast.ClassDef)
        yield importlib.import_module(MODULES[section.name]), section


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
    """Every function and method of the stub: an id, the real object, its node."""
    for module, section in sections():
        for name, node in stubbed(section).items():
            where = f"{module.__name__}.{name}"
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


@pytest.mark.parametrize(("module", "path", "node"), functions())
def test_signature(module: ModuleType, path: tuple[str, ...], node: Function) -> None:
    real: Any = module
    for name in path:
        real = getattr(real, name)
    stub = stub_parameters(node)
    assert real_parameters(real, stub) == stub


@pytest.mark.parametrize(
    ("module", "section"), sections(), ids=lambda value: getattr(value, "__name__", "")
)
def test_names_are_exported(module: ModuleType, section: ast.ClassDef) -> None:
    """Each promised name is in ``__all__`` and there; the package has nothing beyond them."""
    promised = set(stubbed(section))
    exported = set(module.__all__)
    assert promised - exported == set()
    assert [name for name in exported if not hasattr(module, name)] == []
    if module is torch_ops:
        errors = set(importlib.import_module("torch_ops.errors").__all__)
        assert exported - promised - errors - SUBMODULES - {"__version__"} == set()
        assert errors - exported == set()
    else:
        assert exported - promised == set()


def test_star_import_and_dir_agree() -> None:
    public = {name for name in dir(torch_ops) if not name.startswith("_")}
    assert set(torch_ops.__all__) - public - {"__version__"} == set()


def test_enum_members_and_attributes() -> None:
    for module, section in sections():
        for name, node in stubbed(section).items():
            if not isinstance(node, ast.ClassDef):
                continue
            real = getattr(module, name)
            members = [m for m in stubbed(node) if m.isupper()]
            assert [m for m in members if getattr(real, m).value != m.lower()] == []


def test_error_bases() -> None:
    errors = importlib.import_module("torch_ops.errors")
    for module, section in sections():
        if module is not errors:
            continue
        for name, node in stubbed(section).items():
            assert isinstance(node, ast.ClassDef)
            bases = tuple(ast.unparse(base) for base in node.bases)
            real = getattr(torch_ops, name)
            assert real is getattr(errors, name)
            assert tuple(base.__name__ for base in real.__bases__) == bases


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
