"""Tests that need a GPU and have no place beside what they test."""
