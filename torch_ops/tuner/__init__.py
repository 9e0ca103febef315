"""Measures which kernel is fastest, for tables that `torch_ops.tuning` reads. Never in a call."""
