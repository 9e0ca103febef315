"""Measurements behind the project's claims; run one by ``python -m benchmarks NAME``."""
