"""A module without its kernel."""
