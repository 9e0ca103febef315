"""A module that can't be imported, in a package that can."""

raise OSError("crooked was built for another driver (12.8, found 11.4)")
