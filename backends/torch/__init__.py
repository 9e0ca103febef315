"""The references of all ops, run by PyTorch as they are."""

__all__ = ["attention_backends", "available", "deterministic"]

attention_backends = ("torch_flash", "torch_cudnn", "torch_math")
deterministic = {"attention_backward": {"cpu", "rocm"}}
"""On NVIDIA GPUs flash attention adds up gradients in no fixed order."""


def available() -> str | None:
    """PyTorch is always there."""
    return None
