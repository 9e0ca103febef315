"""Every class of error: what it derives from, its plain text, and that it survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import torch_ops
from torch_ops import Backend, Candidate, errors

# The classes that callers may rely on; there may be more.
BASES = {
    "UnknownOpError": KeyError,
    "UnknownBackendError": KeyError,
    "NoBackendError": ValueError,
    "AmbiguousBackendError": ValueError,
    "BackendUnavailableError": ValueError,
    "RegistrationConflictError": ValueError,
    "InvalidTargetError": ValueError,
    "DeclarationError": TypeError,
    "PluginConflictError": ValueError,
    "TuningTableError": ValueError,
    "UnknownVariableError": ValueError,
    "NoBackwardError": NotImplementedError,
    "AttentionOverrideError": ValueError,
    "NotPreparedError": RuntimeError,
    "CaptureError": RuntimeError,
}
DATA: dict[str, dict[str, Any]] = {
    "NoBackendError": {"op": "x", "candidates": (Candidate(Backend.TORCH, False, ("r",), "x"),)},
    "AmbiguousBackendError": {"op": "x", "candidates": ()},
    "BackendUnavailableError": {"op": "x", "backend": "torch", "reasons": ("a", "b")},
    "AttentionOverrideError": {"refused": {"layers.0": ("why",)}},
    "UnknownOpError": {"op": "x"},
    "UnknownBackendError": {"op": "x", "backend": "y"},
}


def test_every_class_is_listed_and_exported() -> None:
    made = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert made == set(errors.__all__) >= {*BASES, "TorchOpsError"}
    for name in made:
        assert getattr(torch_ops, name) is getattr(errors, name)


@pytest.mark.parametrize("name", BASES)
def test_class(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.TorchOpsError)
    assert issubclass(kind, BASES[name])
    data = DATA.get(name, {})
    message = "op 'x' says:\n  a plain \"text\""
    error = kind(message, **data)
    assert str(error) == message, "the text is plain, also that of the KeyErrors"
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is kind
        assert str(copied) == message
        for field, value in data.items():
            assert getattr(copied, field) == value


def test_nearest_and_listing() -> None:
    assert errors.nearest("rms_nrom", ["rms_norm", "layer_norm"]) == " Did you mean 'rms_norm'?"
    assert errors.nearest("zzz", ["rms_norm"]) == ""
    assert errors.listing(["a", "b"]) == "'a', 'b'"
    assert errors.listing([]) == "none"
