"""The references of all ops, compiled by Inductor: C++ on a CPU, Triton on a GPU."""

__all__ = ["available"]


def available() -> str | None:
    """Inductor is a part of PyTorch; what a device needs is asked for each call."""
    return None
