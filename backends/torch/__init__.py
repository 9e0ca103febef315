"""The references of all ops, run by PyTorch as they are."""

__all__ = ["available"]


def available() -> str | None:
    """PyTorch is always there."""
    return None
