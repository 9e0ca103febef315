"""Tests of what is measured, and how."""
