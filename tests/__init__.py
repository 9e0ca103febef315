"""Tests; fixtures of one folder are used by another."""
