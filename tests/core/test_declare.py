"""Declaring ops: schema, checks, fake and documentation from one function; twice and otherwise."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_ops
from torch_ops import DeclarationError, KernelSpec, contracts, declare, ops
from torch_ops.declarations import catalogue

from .conftest import Install

pytestmark = pytest.mark.usefixtures("declaring")
CONTRACT = contracts.Contract()


def serve(declaration: declare.Declaration) -> None:
    """Let the declared function itself be the op's kernel."""
    target = f"{__name__}:_Served.{declaration.name}"
    setattr(_Served, declaration.name, staticmethod(declaration.reference))
    torch_ops.register_kernel(KernelSpec(declaration.name, "torch", target))


class _Served:
    """Holds the kernels of this module's ops."""


def renamed(name: str, **how: Any) -> Callable[[Callable[..., Any]], declare.Declaration]:
    """Declare under a name of the test's own: an operator stays for the life of the process."""
    wrap = declare.op(**{"contract": CONTRACT, **how})

    def rename(function: Callable[..., Any]) -> declare.Declaration:
        function.__name__ = name
        return wrap(function)

    return rename


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_catalogue(name: str) -> None:
    declaration = catalogue()[name]
    assert declaration.name == declaration.reference.__name__ == name
    assert declaration.doc.splitlines()[0].endswith(".")
    assert declaration.site.endswith(f".py:{declaration.reference.__code__.co_firstlineno}")
    assert declaration.dtypes in (declare.FLOATS, (torch.float32,))
    assert isinstance(declaration.contract, contracts.Contract)
    assert bool(declaration.mutates) == name.endswith("_")
    assert (declaration.outputs == 0) == name.endswith("_")
    assert set(declaration.mutates) <= set(declaration.tensor_arguments)
    callable_ = getattr(ops, name)
    assert callable_.declaration is declaration
    assert "torch" in {b.value for b in callable_.backends()}
    parameters = inspect.signature(callable_).parameters
    assert list(parameters) == [*declaration.signature.parameters, "backend"]
    assert parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY
    for parameter in declaration.signature.parameters.values():
        assert parameters[parameter.name].default == parameter.default
    assert callable_.__doc__ == declaration.reference.__doc__


def test_catalogue_is_sorted_and_read_only() -> None:
    found = catalogue()
    assert list(found) == sorted(found)
    with pytest.raises(TypeError):
        found["x"] = found["rms_norm"]  # type: ignore[index]


def test_ops_holds_callables_and_names_the_nearest() -> None:
    assert {name for name in vars(ops) if name[0] not in "_@"} == set(catalogue())  # @: pytest's
    with pytest.raises(AttributeError, match=r"no op 'rms_nrom'.*Did you mean 'rms_norm'\?"):
        ops.rms_nrom  # noqa: B018


def test_declare_use_and_add_a_backend() -> None:
    """A declaration and a kernel are all it takes."""

    @declare.op(contract=CONTRACT)
    def test_declare_doubled(x: Tensor, times: int = 2) -> Tensor:
        """Multiply."""
        return x * times

    serve(test_declare_doubled)
    x = torch.ones(3)
    assert torch.ops.torch_ops.test_declare_doubled(x).eq(2).all()
    assert ops.test_declare_doubled(x, 5).eq(5).all()
    assert ops.test_declare_doubled(x, times=5, backend="torch").eq(5).all()
    assert torch.ops.torch_ops.test_declare_doubled.backend(x, 3, "torch").eq(3).all()
    torch.library.opcheck(torch.ops.torch_ops.test_declare_doubled.default, (x, 3))
    torch.library.opcheck(torch.ops.torch_ops.test_declare_doubled.backend, (x, 3, "torch"))
    assert "test_declare_doubled" in catalogue()


def test_a_backend_serves_ops_that_are_declared_later(install: Install, tmp_path: Path) -> None:
    """The kernels of an installed backend are found, whichever came first."""
    install("acme")
    module = tmp_path / "site" / "torch_ops_acme" / "test_declare_late.py"
    module.write_text("def test_declare_late(x):\n    return x + 4\n")
    torch_ops.refresh()

    @declare.op(contract=CONTRACT)
    def test_declare_late(x: Tensor) -> Tensor:
        raise NotImplementedError

    assert [b.value for b in ops.test_declare_late.backends()] == ["acme"]
    assert ops.test_declare_late(torch.zeros(2), backend="acme").eq(4).all()


def test_without_checks_every_call_is_legal() -> None:
    @declare.op(contract=CONTRACT)
    def test_declare_unchecked(x: Tensor) -> Tensor:
        return x + 1

    serve(test_declare_unchecked)
    assert ops.test_declare_unchecked(torch.ones(2, dtype=torch.int32)).eq(2).all()
    with FakeTensorMode():
        assert ops.test_declare_unchecked(torch.empty(2)).shape == (2,)


def test_without_a_fake_the_reference_gives_the_shapes() -> None:
    """Contiguous empties, whatever the strides of the inputs."""

    @declare.op(contract=CONTRACT)
    def test_declare_two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t().contiguous(), x.double().contiguous()

    with FakeTensorMode():
        first, second = torch.ops.torch_ops.test_declare_two(torch.empty(3, 5).t())
    assert (first.shape, first.stride(), first.dtype) == ((3, 5), (5, 1), torch.float32)
    assert (second.shape, second.stride(), second.dtype) == ((5, 3), (3, 1), torch.float64)


def test_twice_is_a_no_op() -> None:
    def make() -> declare.Declaration:
        @declare.op(contract=CONTRACT)
        def test_declare_again(x: Tensor, n: int = 1) -> Tensor:
            return torch.relu(x) + n

        return test_declare_again

    first = make()
    operator = torch.ops.torch_ops.test_declare_again.default
    assert make() is first
    assert torch.ops.torch_ops.test_declare_again.default is operator
    serve(first)
    assert operator(torch.ones(2)).eq(2).all()


def _other_default(op: str) -> None:
    @renamed(op)
    def differs(x: Tensor, n: int = 2) -> Tensor:
        return torch.relu(x) + n


def _other_call(op: str) -> None:
    @renamed(op)
    def differs(x: Tensor, n: int = 1) -> Tensor:
        return torch.tanh(x) + n


def _other_constant(op: str) -> None:
    @renamed(op)
    def differs(x: Tensor, n: int = 1) -> Tensor:
        return torch.relu(x) + n + 1


def _other_contract(op: str) -> None:
    @renamed(op, contract=contracts.Contract(batch_invariant=True))
    def differs(x: Tensor, n: int = 1) -> Tensor:
        return torch.relu(x) + n


def _other_order(op: str) -> None:
    @renamed(op, order={"cpu": ("inductor", "torch")})
    def differs(x: Tensor, n: int = 1) -> Tensor:
        return torch.relu(x) + n


def _other_dtypes(op: str) -> None:
    @renamed(op, dtypes=(torch.float32,))
    def differs(x: Tensor, n: int = 1) -> Tensor:
        return torch.relu(x) + n


def _mutating(op: str) -> None:
    @renamed(op, mutates=("x",))
    def differs(x: Tensor, n: int = 1) -> None:
        x.relu_().add_(n)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (_other_default, "schema"),
        (_other_call, "reference: other code"),
        (_other_constant, "reference: other code"),
        (_other_contract, "contract"),
        (_other_order, "order"),
        (_other_dtypes, "dtypes"),
        (_mutating, "mutates"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_otherwise_under_the_same_name(other: Callable[[str], None], differs: str) -> None:
    """An error that names both sites; the first one stays and works."""
    name = f"test_declare{other.__name__}"

    @renamed(name)
    def first(x: Tensor, n: int = 1) -> Tensor:
        return torch.relu(x) + n

    serve(first)
    with pytest.raises(DeclarationError) as raised:
        other(name)
    message = str(raised.value)
    assert f"op {name!r} is declared differently" in message
    assert differs in message
    line = other.__code__.co_firstlineno + 1
    assert f"Declared at {first.site}" in message
    assert f"rejected at {__file__}:{line}" in message
    assert "The first one stays" in message
    assert catalogue()[name] is first
    assert getattr(ops, name)(torch.ones(2)).eq(2).all()


def test_operator_survives_its_declaration_site() -> None:
    """Declared inside a function: nothing that the collector may take is needed."""

    def declare_here() -> None:
        @declare.op(contract=CONTRACT)
        def test_declare_inside(x: Tensor) -> Tensor:
            return x * 3

        serve(test_declare_inside)

    declare_here()
    for _ in range(3):
        gc.collect()
    operator = torch.ops.torch_ops.test_declare_inside
    assert operator(torch.ones(2)).eq(3).all()
    assert operator.backend(torch.ones(2), "torch").eq(3).all()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).eq(3).all()


def test_annotations_of_the_enclosing_function() -> None:
    """Future annotations, and torch imported in function scope."""
    from torch import Tensor as Local

    @declare.op(contract=CONTRACT)
    def test_declare_local(x: Local, y: Local | None = None) -> Local:
        return x if y is None else x + y

    assert test_declare_local.schema == "(Tensor x, Tensor? y=None) -> Tensor"
    assert test_declare_local.tensor_arguments == ("x", "y")


def test_optional_return_is_refused_with_words() -> None:
    with pytest.raises(DeclarationError, match=r"op 'test_declare_maybe': return type .*None"):

        @declare.op(contract=CONTRACT)
        def test_declare_maybe(x: Tensor) -> Tensor | None:
            return x

    assert "test_declare_maybe" not in catalogue()
    with pytest.raises(AttributeError):
        torch.ops.torch_ops.test_declare_maybe  # noqa: B018


def test_an_op_returns_or_writes() -> None:
    with pytest.raises(DeclarationError, match="op 'idle': it returns nothing and mutates nothing"):

        @declare.op(contract=CONTRACT)
        def idle(x: Tensor) -> None:
            x.add_(1)

    with pytest.raises(DeclarationError, match=r"op 'both': .* mutates \['x'\] \(accepted: an op"):

        @declare.op(contract=CONTRACT, mutates=("x",))
        def both(x: Tensor) -> Tensor:
            return x.add_(1).clone()

    assert not {"idle", "both"} & set(catalogue())


@pytest.mark.parametrize("role", ["check", "debug_check", "fake"])
def test_parts_have_the_declared_signature(role: str) -> None:
    """Refused where it is written, naming both signatures and both places."""
    name = f"test_declare_part_{role}"

    @renamed(name)
    def declared(x: Tensor, eps: float = 1e-6) -> Tensor:
        return x + eps

    def no_default(x: Tensor, eps: float) -> Any:
        raise NotImplementedError

    def other_default(x: Tensor, eps: float = 1e-5) -> Any:
        raise NotImplementedError

    def other_name(y: Tensor, eps: float = 1e-6) -> Any:
        raise NotImplementedError

    for wrong in (no_default, other_default, other_name):
        with pytest.raises(DeclarationError) as raised:
            getattr(declared, role)(wrong)
        message = str(raised.value)
        assert f"op {name!r}: the {role}'s signature differs" in message
        assert f"Declared: {name}(x: 'Tensor', eps: 'float' = 1e-06)" in message
        assert f"Received: {role}{inspect.signature(wrong)}" in message
        assert f"{__file__}:{wrong.__code__.co_firstlineno}" in message
        assert declared.site in message


def test_digest_changes_with_what_compiled_code_rests_on() -> None:
    """Schema, fake and reference: each is in the registry's fingerprint."""
    prints = [torch_ops.registry.fingerprint()]

    @declare.op(contract=CONTRACT)
    def test_declare_digest(x: Tensor) -> Tensor:
        return torch.relu(x)

    prints.append(torch_ops.registry.fingerprint())

    @test_declare_digest.fake
    def _one(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    prints.append(torch_ops.registry.fingerprint())

    @test_declare_digest.fake
    def _two(x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.float64)

    prints.append(torch_ops.registry.fingerprint())
    assert len(set(prints)) == 4


def test_fingerprint_is_the_same_in_every_process(python: Callable[..., str]) -> None:
    """Whatever the seed of string hashes, or the on-disk caches would never hit."""
    script = "import torch_ops; print(torch_ops.registry.fingerprint())"
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    assert python(script, PYTHONHASHSEED=other).strip() == torch_ops.registry.fingerprint()
