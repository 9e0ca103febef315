"""Bridges to other libraries, one module each. Importing this package imports none of them."""
