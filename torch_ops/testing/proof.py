"""What a proof of an op consists of, and where proofs are found.

A proof is a module `torch_ops/testing/proofs/<op>.py` with a module-level `proof`. Nothing else
names an op: a new file is found by its name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing.spec import Spec

if TYPE_CHECKING:
    from torch_ops.testing._hypothesis import SearchStrategy

Arguments = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
_PROOFS = "torch_ops.testing.proofs"
NAMED_LIMIT = 2**17


@dataclass(frozen=True)
class Output:
    """What one output has to be.

    Attributes:
        name: The output's name in messages.
        value: The exact value in float64; where `bound` is None, the value itself in `dtype`.
        bound: The largest allowed difference per element, or None for bit equality. Infinite where
            the value is finite and undefined: anything is right there, NaN too.
        dtype: The output's dtype.
        given: Makes of all outputs what this one has to be, where others decide about that, as a
            scale about codes; `value` and `bound` are then those for the exact ones.
    """

    name: str
    value: Tensor
    bound: Tensor | None
    dtype: Any
    given: Callable[[tuple[Tensor, ...]], Output] | None = None


@dataclass(frozen=True)
class Pair:
    """Two tensors that a law compares: equal bit for bit, or within `bound` of each other."""

    what: str
    actual: Tensor
    expected: Tensor
    bound: Tensor | None = None


@dataclass(frozen=True)
class Trial:
    """One executed example, as laws see it.

    `args` are contiguous copies of the arguments from before the call, `outputs` what the kernel
    gave for them, and `expected` what the oracle makes of them. `given` is what it gave for the
    example as it is laid out: where bits may hang on the layout, that may be something else. `run`
    calls the kernel again with some arguments replaced; laws never change a tensor in place.
    `refuses` is what the kernel's predicate says of arguments, `other` calls another op by the same
    backend, or its reference where the kernel is none of a backend.
    """

    spec: Spec
    args: Arguments
    outputs: tuple[Tensor, ...]
    contract: Any
    expected: tuple[Output, ...]
    call: Callable[[Arguments], tuple[Tensor, ...]]
    refuses: Callable[[Arguments], str | None] = lambda _: None
    other: Callable[..., Any] = lambda op, *args: catalogue()[op].reference(*args)
    given: tuple[Tensor, ...] = ()

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Returns the outputs for the same arguments with these replaced."""
        return self.call({**self.args, **changes})


@dataclass(frozen=True)
class Law:
    """A relation between calls that holds for every correct kernel.

    `pairs` returns None where the law says nothing about this example. A law with `declared` is
    one of kernels whose contract has that flag, one with `dtypes` is about those alone.
    """

    name: str
    statement: str
    pairs: Callable[[Trial], Sequence[Pair] | None]
    declared: str = ""
    dtypes: tuple[str, ...] | None = None

    def about(self, dtype: str) -> bool:
        """Whether the law may have something to say about calls of a dtype."""
        return self.dtypes is None or dtype in self.dtypes

    def binds(self, contract: Any) -> bool:
        """Whether kernels under this contract have to obey."""
        return not self.declared or bool(getattr(contract, self.declared))


@dataclass(frozen=True)
class Mutant:
    """A planted fault: a kernel with the op's signature that `kills` must find wrong.

    `kills` holds names of laws, or ``"bound"``, ``"contract"``, ``"zero"``. For a mutating op the
    function returns the outputs, and is made to write them, unless it is `in_place` itself.
    """

    name: str
    kills: tuple[str, ...]
    function: Callable[..., Any]
    in_place: bool = False


@dataclass(frozen=True)
class Proof:
    """Everything the kit has to know about one op.

    Attributes:
        op: The op's name.
        arguments: Names of the arguments in the order of the signature.
        shapes: Shape of every tensor argument, from the dims of a Spec.
        draw: Strategy of Specs for one dtype within a budget of elements.
        axes: Axes of the covering array, without the dtype.
        row: Spec of one row of the covering array.
        zero: Specs with zero sizes, for one dtype.
        classes: Specs with infinities and NaN, for one dtype.
        named: Specs of sizes that models run, by name, for one dtype. Those up to `NAMED_LIMIT`
            elements a tensor are proven; benchmarks time them all.
        oracle: Exact outputs and bounds, from contiguous arguments and the contract.
        laws: The op's laws.
        mutants: Planted faults; every law kills at least three.
        fill: Content of a tensor argument where it isn't what its operand says alone: takes the
            Spec, the argument's name and the content that the operand gives. Tables are made so,
            and what no kernel may read.
        mutates: Arguments that the op writes; they are its outputs.
        cost: Divides the number of examples, for ops whose oracle is slow; past 4, also of those
            that are traced and compiled.
    """

    op: str
    arguments: tuple[str, ...]
    shapes: Callable[[Spec], Shapes]
    draw: Callable[[str, int], SearchStrategy[Spec]]
    axes: Mapping[str, Sequence[Any]]
    row: Callable[[str, Mapping[str, Any]], Spec]
    zero: Callable[[str], list[Spec]]
    classes: Callable[[str], list[Spec]]
    named: Callable[[str], dict[str, Spec]]
    oracle: Callable[[Arguments, Any], tuple[Output, ...]]
    laws: tuple[Law, ...]
    mutants: tuple[Mutant, ...]
    fill: Callable[[Spec, str, Tensor], Tensor] | None = None
    mutates: tuple[str, ...] = ()
    cost: int = 1

    def small_named(self, dtype: str) -> list[Spec]:
        """Give the named Specs that are small enough to be proven everywhere."""
        return [
            spec
            for spec in self.named(dtype).values()
            if max(math.prod(shape) for shape in self.shapes(spec).values()) <= NAMED_LIMIT
        ]


def proof_names() -> list[str]:
    """Names of the ops that have a proof, sorted; imports none of them."""
    return list(_names())


@functools.cache  # each example asks for its proof
def _names() -> tuple[str, ...]:
    found = importlib.util.find_spec(_PROOFS)
    if found is None or found.submodule_search_locations is None:
        msg = f"{_PROOFS} is not installed"
        raise ModuleNotFoundError(msg, name=_PROOFS)
    modules = pkgutil.iter_modules(found.submodule_search_locations)
    return tuple(sorted(m.name for m in modules if not m.name.startswith("_")))


def proof_of(op: str) -> Proof:
    """Returns the proof of an op.

    Raises:
        LookupError: There is none.
    """
    if op not in proof_names():
        msg = f"No proof for op {op!r}: expected {_PROOFS}.{op}; there are {proof_names()}"
        raise LookupError(msg)
    found = importlib.import_module(f"{_PROOFS}.{op}").proof
    if not isinstance(found, Proof):
        msg = f"{_PROOFS}.{op}.proof: received {type(found).__name__}, accepted Proof"
        raise TypeError(msg)
    return found


def proofs() -> Iterator[Proof]:
    """Yields every proof, sorted by op."""
    for op in proof_names():
        yield proof_of(op)
