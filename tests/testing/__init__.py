"""Tests of the numerics kit, and proofs of the references by it."""
