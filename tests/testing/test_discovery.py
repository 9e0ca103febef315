"""Proofs are found by name, fit their declarations, and nothing else in the kit names an op."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_ops.testing
from torch_ops.declarations import catalogue
from torch_ops.testing.proof import proof_names, proof_of, proofs

KIT = Path(torch_ops.testing.__file__).parent


def test_every_declared_op_of_ours_has_a_proof() -> None:
    ours = {n for n, d in catalogue().items() if d.site.startswith(str(KIT.parent))}
    assert set(proof_names()) == ours
    assert [p.op for p in proofs()] == proof_names()


@pytest.mark.parametrize("op", proof_names())
def test_a_proof_has_the_arguments_of_its_declaration(op: str) -> None:
    declaration, proof = catalogue()[op], proof_of(op)
    assert proof.arguments == tuple(declaration.signature.parameters)
    assert proof.mutates == declaration.mutates


def test_the_kit_names_no_op() -> None:
    for path in KIT.glob("*.py"):
        text = path.read_text()
        for op in proof_names():
            if op != "attention":  # a word of the language too
                assert not re.search(rf"\b{op}\b", text), f"{path.name} names {op}"


def test_an_op_without_proof_is_an_error_that_lists_proofs() -> None:
    with pytest.raises(LookupError, match=r"No proof for op 'nope': expected .*\.nope; there are"):
        proof_of("nope")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_package_does_not_import_the_kit() -> None:
    done = _python("import sys, torch_ops; sys.exit('torch_ops.testing' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_plugin_imports_neither_hypothesis_nor_a_proof() -> None:
    done = _python(
        "import sys, torch_ops.testing.plugin\n"
        "sys.exit(any(n == 'hypothesis' or '.proofs' in n for n in sys.modules))"
    )
    assert done.returncode == 0, done.stderr


def test_without_hypothesis_the_message_says_what_to_install() -> None:
    done = _python("import sys; sys.modules['hypothesis'] = None\nimport torch_ops.testing.verify")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: torch_ops.testing needs hypothesis: pip install 'torch-ops[test]'"
    )


def test_public_names_resolve() -> None:
    for name in torch_ops.testing.__all__:
        assert getattr(torch_ops.testing, name) is not None
    with pytest.raises(AttributeError, match=r"module 'torch_ops.testing' has no attribute 'no'"):
        torch_ops.testing.no  # noqa: B018
