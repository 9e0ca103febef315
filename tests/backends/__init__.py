"""Tests of the backends that wrap other packages."""
