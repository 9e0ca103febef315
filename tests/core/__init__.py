"""Tests of the core, mirroring its modules."""
