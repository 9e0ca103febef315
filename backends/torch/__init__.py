"""The references of all ops, run by PyTorch as they are."""

__all__ = ["attention_backends", "available"]

attention_backends = ("torch_flash", "torch_cudnn", "torch_math")


def available() -> str | None:
    """PyTorch is always there."""
    return None
