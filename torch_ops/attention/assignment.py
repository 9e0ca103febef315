"""One declaration for a whole model: what each role runs, in prefill and in decode."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.layer import Attention
from torch_ops.attention.override import OverrideToken, refuse_now, swap
from torch_ops.attention.phases import PhaseBackends, target_of
from torch_ops.attention.selection import select
from torch_ops.errors import AttentionOverrideError, listing

__all__ = ["PhaseBackends", "assign_attention_backends", "role_of"]

WINDOW, SELF = "window", "self"


def role_of(layer: Attention) -> str:
    """Give the role that a layer was built with, else ``"window"`` or ``"self"`` by its window."""
    if layer.role is not None:
        return layer.role
    return WINDOW if layer.spec.window_left >= 0 else SELF


def assign_attention_backends(
    model: nn.Module,
    by_role: Mapping[str, AttentionBackend | PhaseBackends | str | None],
    *,
    dry_run: bool = False,
) -> OverrideToken:
    """Make the layers of each role run its families from their next call on; all or none.

    ``assign_attention_backends(model, {"self": PhaseBackends("flashinfer_fa3", "triton"),
    "window": "triton", "cross": "torch_flash"})``

    Args:
        model: Any module; its `Attention` layers are found at any depth.
        by_role: Families by role, see `role_of`; None is each layer's construction default. Layers
            of other roles stay as they are.
        dry_run: Prepare and validate alone; the report says what would be switched.

    Returns:
        A token with the report and ``undo``; as a context manager it undoes at the end.

    Raises:
        AttentionOverrideError: no layer has one of the roles, or a layer can't run its target.
            Nothing was changed.
        CaptureError: a stream is capturing.
        TypeError: ``by_role`` is no mapping.
        ValueError: a target is unknown, or there is none.
    """
    refuse_now("An attention override")
    if not isinstance(by_role, Mapping) or not by_role:
        raise (ValueError if isinstance(by_role, Mapping) else TypeError)(
            f"Attention backends by role: argument 'by_role' is {by_role!r} (accepted: a mapping "
            "of at least one role to its backends)"
        )
    targets = {role: None if value is None else target_of(value) for role, value in by_role.items()}
    everything = select(model, None)
    roles = {name: role_of(layer) for name, layer in everything.items()}
    missing = [role for role in targets if role not in roles.values()]
    if missing:
        raise AttentionOverrideError(
            f"Attention backends by role: no layer has the role {listing(missing)} (roles of the "
            f"model's {len(roles)} layers: {listing(sorted(set(roles.values())))}). Nothing was "
            "changed.",
            refused={},
        )
    chosen = {name: layer for name, layer in everything.items() if roles[name] in targets}
    wanted = {name: targets[roles[name]] for name in chosen}
    return swap(wanted, chosen, everything.values(), dry_run)
