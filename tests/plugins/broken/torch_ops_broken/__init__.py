"""A backend whose shared library is missing."""

raise ImportError("libbroken.so.7: cannot open shared object file")
