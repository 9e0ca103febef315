"""What one example is: a small frozen value that every argument tensor is made from.

A `Spec` holds no tensor. The same value is drawn by hypothesis, printed when an example fails,
sent to another process as JSON, and built into tensors anywhere with the same content.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Operand:
    """How one tensor argument looks, except for its shape, which follows from the dims.

    Attributes:
        dtype: Name of a torch dtype, such as ``"bfloat16"``.
        layout: One of ``layouts.LAYOUTS``.
        regime: One of ``values.REGIMES``.
        high: Exclusive upper end of the values, for index operands.
        specials: ``(flat position, name)`` pairs written over the values; a position counts
            modulo the number of elements, a name is one of ``values.SPECIALS``.
    """

    dtype: str = "float32"
    layout: str = "contig"
    regime: str = "normal"
    high: int = 0
    specials: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Spec:
    """One example of an op: which op, which sizes, which scalars, and how each tensor looks.

    The three tables are tuples of pairs, so that a Spec is hashable. An optional tensor that is
    absent from `operands` is passed as None.
    """

    op: str
    dims: tuple[tuple[str, int], ...]
    operands: tuple[tuple[str, Operand], ...]
    params: tuple[tuple[str, Scalar], ...] = ()
    seed: int = 0

    @classmethod
    def of(
        cls,
        op: str,
        dims: Mapping[str, int],
        operands: Mapping[str, Operand],
        params: Mapping[str, Scalar] | None = None,
        seed: int = 0,
    ) -> Spec:
        """Makes a Spec from mappings."""
        return cls(
            op=op,
            dims=tuple(dims.items()),
            operands=tuple(operands.items()),
            params=tuple((params or {}).items()),
            seed=seed,
        )

    @property
    def dim(self) -> dict[str, int]:
        """The sizes by name."""
        return dict(self.dims)

    @property
    def dtype(self) -> str:
        """The dtype that the example counts for: of the output if that is asked for, else of x."""
        asked = self.param.get("out_dtype")
        return asked if isinstance(asked, str) else self.operands[0][1].dtype

    @property
    def operand(self) -> dict[str, Operand]:
        """The tensor arguments by name."""
        return dict(self.operands)

    @property
    def contiguous(self) -> bool:
        """Whether all operands are laid out as a contiguous tensor."""
        return all(operand.layout == "contig" for _, operand in self.operands)

    @property
    def param(self) -> dict[str, Scalar]:
        """The scalar arguments by name."""
        return dict(self.params)

    def replace(self, **changes: Any) -> Spec:
        """Returns a copy with other fields; mappings are accepted for the three tables."""
        fixed: dict[str, Any] = {
            k: tuple(v.items()) if isinstance(v, Mapping) else v for k, v in changes.items()
        }
        return dataclasses.replace(self, **fixed)

    def to_json(self) -> str:
        """Returns the Spec as one line of JSON."""
        return json.dumps(
            {
                "op": self.op,
                "dims": self.dim,
                "params": self.param,
                "operands": {name: dataclasses.asdict(o) for name, o in self.operands},
                "seed": self.seed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: A field is missing or unknown.
        """
        data = json.loads(text)
        fields = {"op", "dims", "params", "operands", "seed"}
        if not isinstance(data, dict) or set(data) != fields:
            received = sorted(data) if isinstance(data, dict) else type(data).__name__
            msg = f"Spec.from_json: text: received fields {received}, accepted {sorted(fields)}"
            raise ValueError(msg)
        operands = {name: _operand(name, fields) for name, fields in data["operands"].items()}
        return cls.of(data["op"], data["dims"], operands, data["params"], data["seed"])


def _operand(name: str, fields: dict[str, Any]) -> Operand:
    accepted = {f.name for f in dataclasses.fields(Operand)}
    if not set(fields) <= accepted:
        msg = (
            f"Spec.from_json: operand {name!r}: received fields {sorted(fields)}, "
            f"accepted {sorted(accepted)}"
        )
        raise ValueError(msg)
    specials = tuple((int(i), str(s)) for i, s in fields.get("specials", ()))
    return Operand(**{**fields, "specials": specials})
