"""Attention from other distributions: found, chosen, refused, broken, clashing."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    attention_state,
    override_attention_backend,
)

from . import support
from .conftest import SCRIPTED, Install

REFUSED = torch_ops.AttentionOverrideError
INIT = {"__init__.py": "def available():\n    return None\n"}
PREPARE = """
import torch
from torch_ops.attention import AttentionBackend, PreparedAttention

class Sevens(PreparedAttention):
    backend = AttentionBackend({name!r})

    def run(self, q, k, v):
        return torch.full_like(q, 7.0)

def prepare(spec, device, dtype):
    return Sevens()
"""


def sevens(name: str, extra: str = "") -> dict[str, str]:
    """The files of a backend whose attention is always 7."""
    return INIT | {"attention.py": PREPARE.format(name=name) + textwrap.dedent(extra)}


def test_a_plugin_is_a_member_and_serves_layers(install: Install) -> None:
    assert "acme" not in AttentionBackend
    install("acme", sevens("acme"))
    acme = AttentionBackend("acme")
    assert acme is AttentionBackend.ACME  # type: ignore[attr-defined]
    assert acme in list(AttentionBackend)
    assert acme is pickle.loads(pickle.dumps(acme))
    layer = Attention(4, 8, 2)
    with override_attention_backend(layer, "acme"):
        assert layer.backend is acme
        assert layer(*support.inputs(layer)).eq(7).all()
    assert layer.backend is AttentionBackend.TORCH_FLASH, "installing it changes nothing"
    assert Attention(4, 8, backend="acme").backend is acme
    assert Attention(4, 8, supported_backends=[acme, "torch_math"]).backend == "torch_math"


def test_a_plugin_is_chosen_by_scope_process_and_environment(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", sevens("acme"))
    layer = Attention(4, 8, 2)
    inputs = support.inputs(layer)
    with torch_ops.use_backend(attention="acme"), torch_ops.trace() as trace:
        assert layer(*inputs).eq(7).all()
    undo = torch_ops.set_backend(attention="acme")
    with torch_ops.trace() as by_process:
        layer(*inputs)
    undo()
    monkeypatch.setenv("TORCH_OPS_BACKEND", "attention=acme")
    torch_ops.refresh()
    with torch_ops.trace() as by_environment:
        layer(*inputs)
    records = [t.records[0] for t in (trace, by_process, by_environment)]
    assert [record.source for record in records] == ["scope", "process", "environment"]
    assert [record.backend.value for record in records] == ["acme"] * 3


def test_a_plugin_without_attention_is_no_attention_backend(install: Install) -> None:
    install("acme", INIT)
    with pytest.raises(ValueError, match="'acme' is not an AttentionBackend") as error:
        AttentionBackend("acme")
    assert str(error.value).endswith(
        "A backend 'acme' is installed, but it serves no attention layers."
    )
    layer = Attention(4, 8)
    text = "backend 'acme', chosen by scope, serves no attention layers"
    with (
        torch_ops.use_backend("acme"),
        pytest.raises(torch_ops.BackendUnavailableError, match=text),
    ):
        layer(*support.inputs(layer))


def test_a_plugin_of_several_families_is_told_which(install: Install) -> None:
    files = {path.name: path.read_text() for path in SCRIPTED.glob("*.py")}
    install("scripted", files)
    layer = Attention(4, 8)
    inputs = support.inputs(layer)
    for number, value in enumerate(("scripted_one", "scripted_two", "scripted_three"), 1):
        override_attention_backend(layer, value)
        assert layer(*inputs).eq(number).all()
    with pytest.raises(ValueError, match="Backend 'scripted' serves 'scripted_one', 'scripted_tw"):
        AttentionBackend("scripted")


@pytest.mark.parametrize(
    ("extra", "reason", "cause"),
    [
        (
            """
            def supports(spec, device, dtype):
                return f"head_dim {spec.head_dim} (supported: 64, 128)"
            """,
            "head_dim 8 (supported: 64, 128)",
            "head_dim 8",
        ),
        (
            """
            def supports(spec, device, dtype):
                raise OSError("driver 11.4 is too old")
            """,
            "torch_ops_acme.attention: OSError: driver 11.4 is too old",
            "driver 11.4 is too old",
        ),
        (
            """
            def supports(spec, device, dtype):
                return True
            """,
            "torch_ops_acme.attention: TypeError: supports() must return None or a reason, "
            "received True",
            "received True",
        ),
        (
            """
            def prepare(spec, device, dtype):
                raise RuntimeError("no kernel image is available for execution on the device")
            """,
            "RuntimeError: no kernel image is available",
            "no kernel image is available",
        ),
        (
            """
            def prepare(spec, device, dtype):
                raise ValueError("workspace of 0 bytes")
            """,
            "preparing 'acme' raised ValueError: workspace of 0 bytes",
            "workspace of 0 bytes",
        ),
        (
            """
            def prepare(spec, device, dtype):
                return None
            """,
            "prepare() of 'acme' must return a PreparedAttention that names its AttentionBackend, "
            "received None",
            "received None",
        ),
        (
            """
            class Sevens(PreparedAttention):
                backend = "acme"
            """,
            "must return a PreparedAttention that names its AttentionBackend",
            "names its AttentionBackend",
        ),
        (
            """
            class Sevens(PreparedAttention):
                backend = AttentionBackend.TORCH_MATH
            """,
            "Attention backend override 'acme' resolved to 'torch_math' on Attention; refusing the "
            "request instead of silently falling back",
            "resolved to 'torch_math'; refusing it instead of silently falling back",
        ),
        (
            """
            class Sevens(PreparedAttention):
                backend = AttentionBackend("acme")
            """,
            "preparing 'acme' raised NotImplementedError: Sevens serves no dense calls",
            "Sevens serves no dense calls",
        ),
        (
            "del prepare",
            "AttributeError: module 'torch_ops_acme.attention' has no attribute 'prepare'",
            "has no attribute 'prepare'",
        ),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'",
            "No module named 'no_such_module'",
        ),
    ],
)
def test_a_faulty_plugin_is_refused_with_its_reason(
    install: Install, extra: str, reason: str, cause: str
) -> None:
    install("acme", sevens("acme", extra))
    model = support.stack(2)
    before = attention_state(model)
    for _ in range(2):
        with pytest.raises(REFUSED, match=re.escape(reason)) as error:
            override_attention_backend(model, "acme")
        assert set(error.value.refused) == {"layers.0", "layers.1"}
        assert attention_state(model) == before
    inputs = support.inputs(support.layers(model)[0])
    model(*inputs)
    with torch_ops.use_backend(attention="acme"), pytest.raises(Exception, match=cause):
        model(*inputs)
    model(*inputs)


def test_a_package_that_cannot_be_imported_says_so(install: Install) -> None:
    broken = "raise ImportError('libacme.so.3: cannot open shared object file')\n"
    install("acme", {"__init__.py": broken, "attention.py": ""})
    reason = "ImportError: libacme.so.3: cannot open shared object file"
    with pytest.raises(ValueError, match=re.escape(reason)):
        AttentionBackend("acme")
    layer = Attention(4, 8)
    with pytest.raises(ValueError, match=re.escape(reason)):
        override_attention_backend(layer, "acme")
    assert support.sdpa(lambda: layer(*support.inputs(layer)))


def test_an_unavailable_plugin_is_refused_and_not_imported(install: Install) -> None:
    files = {
        "__init__.py": "def available():\n    return 'acme 2.0 needs a license file'\n",
        "attention.py": "raise AssertionError('imported')\n",
    }
    install("acme", files)
    with pytest.raises(REFUSED, match=r"acme 2\.0 needs a license file") as error:
        override_attention_backend(Attention(4, 8), "acme")
    assert "imported" not in str(error.value)


def test_a_plugin_for_another_platform_is_refused_and_not_imported(install: Install) -> None:
    init = (
        "from torch_ops import Requirement\n"
        "requires = frozenset({Requirement.cuda(min_arch=(9, 0))})\n"
    )
    install("acme", {"__init__.py": init, "attention.py": "raise AssertionError('imported')\n"})
    layer = Attention(4, 8)
    if layer(*support.inputs(layer)).device.type == "cpu":
        with pytest.raises(REFUSED, match=r"CUDA only \(device is 'cpu'\)"):
            override_attention_backend(layer, "acme")


def test_one_name_from_two_distributions_is_a_conflict(install: Install) -> None:
    first = install("acme", sevens("acme"))
    second = install("acme", sevens("acme"), package="other_acme", dist="other-acme")
    text = "Backend 'acme' is provided by several distributions"
    with pytest.raises(torch_ops.PluginConflictError, match=text) as error:
        AttentionBackend("acme")
    assert set(error.value.distributions) == {first, second}
    layer = Attention(4, 8)
    with pytest.raises(torch_ops.PluginConflictError, match=text):
        override_attention_backend(layer, "acme")
    assert layer(*support.inputs(layer)).isfinite().all(), "the others still work"


def test_one_family_of_two_backends_is_a_conflict(install: Install) -> None:
    files = sevens("torch_math")
    files["__init__.py"] += "attention_backends = ('torch_math',)\n"
    label = install("acme", files)
    layer = Attention(4, 8)
    with pytest.raises(torch_ops.PluginConflictError, match="'torch_math' is claimed by") as error:
        override_attention_backend(layer, "torch_math")
    assert label in error.value.distributions
    assert not layer(*support.inputs(layer)).eq(7).any()


def test_optional_arguments_of_a_plugin_are_left_alone(install: Install) -> None:
    extra = """
    def prepare(spec, device, dtype, workspace=None, *, threads=1):
        assert workspace is None, workspace
        return Sevens()

    def supports(spec, device, dtype, strict=False, **options):
        return "strict" if strict else None
    """
    install("acme", sevens("acme", extra))
    layer = Attention(4, 8)
    override_attention_backend(layer, "acme")
    assert layer.backend.value == "acme"


def test_an_uninstalled_plugin_is_refused(install: Install, tmp_path: Path) -> None:
    install("acme", sevens("acme"))
    layer = Attention(4, 8)
    override_attention_backend(layer, "acme")
    for metadata in tmp_path.glob("site/*.dist-info"):
        (metadata / "entry_points.txt").write_text("")
    torch_ops.refresh()
    reason = "no installed backend serves 'acme'"
    with pytest.raises(torch_ops.BackendUnavailableError, match=reason):
        layer(*support.inputs(layer))
    with pytest.raises(REFUSED, match=reason):
        override_attention_backend(Attention(4, 8), "acme")
    override_attention_backend(layer, None)
    layer(*support.inputs(layer))


def test_a_new_process_finds_plugins_and_survives_broken_ones(tmp_path: Path) -> None:
    support.distribution(tmp_path, "acme", sevens("acme"))
    support.distribution(tmp_path, "broken", {"__init__.py": "1 / 0\n", "attention.py": ""})
    script = """
    import sys
    import torch, torch_ops
    from torch_ops.attention import Attention, AttentionBackend, override_attention_backend
    assert "torch_ops_acme" not in sys.modules
    layer = Attention(4, 8)
    x = torch.randn(1, 3, 4, 8)
    layer(x, x, x)
    assert "torch_ops_acme.attention" not in sys.modules
    assert AttentionBackend("acme") in AttentionBackend
    assert [m.value for m in AttentionBackend].count("acme") == 1
    override_attention_backend(layer, "acme")
    assert layer(x, x, x).eq(7).all()
    try:
        AttentionBackend("broken")
    except ValueError as error:
        assert "ZeroDivisionError: division by zero" in str(error), error
    else:
        raise AssertionError("a broken backend is a member")
    """
    assert run_python(script, tmp_path) == ""


def run_python(script: str, site: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OPS_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=clean | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pickled_layers_need_their_plugin(tmp_path: Path, install: Install) -> None:
    install("acme", sevens("acme"))
    layer = Attention(4, 8)
    override_attention_backend(layer, "acme")
    file = tmp_path / "layer.pickle"
    file.write_bytes(pickle.dumps(layer))
    script = f"""
    import pathlib, pickle, sys, torch, torch_ops
    data = pathlib.Path({str(file)!r}).read_bytes()
    try:
        pickle.loads(data)
    except ValueError as error:
        print(str(error).partition(".")[0])
    sys.path.append({str(tmp_path / "site")!r})
    torch_ops.refresh()
    layer, x = pickle.loads(data), torch.randn(1, 3, 4, 8)
    print(layer.backend, bool(layer(x, x, x).eq(7).all()))
    """
    printed = run_python(script, tmp_path / "none").splitlines()
    assert printed == ["'acme' is not an AttentionBackend", "acme True"]


def test_the_second_layer_of_a_kind_has_its_own_state(script: Any) -> None:
    model = support.stack(2)
    override_attention_backend(model, "scripted_one")
    assert script.counts["prepare", "scripted_one"] == 2
    first, second = (layer._cache._prepared for layer in support.layers(model))
    assert {id(p) for p in first.values()}.isdisjoint(id(p) for p in second.values())


def test_what_is_prepared_in_inference_mode_may_be_written_outside_of_it(install: Install) -> None:
    files = sevens("acme")
    files["attention.py"] = files["attention.py"].replace(
        "    def run(self, q, k, v):\n",
        "    def __init__(self):\n        self.runs = torch.zeros(())\n\n"
        "    def run(self, q, k, v):\n        self.runs.add_(1)\n",
    )
    install("acme", files)
    layer = Attention(4, 8, 2)
    inputs = support.inputs(layer)
    with torch_ops.use_backend(attention="acme"):
        with torch.inference_mode():
            layer(*inputs)
        layer(*inputs)
    prepared: Any = layer._cache.get(AttentionBackend("acme"), layer._place())
    assert prepared.runs.item() == 4, "two at first, then these"
