"""Tests of what the benchmarks count, check and print."""
