"""The built-in backends, one package each; the registry finds them by entry point."""
