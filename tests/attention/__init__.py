"""Tests of attention layers and overrides."""
