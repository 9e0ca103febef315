"""Never reached: the package can't be imported."""

raise AssertionError("imported below a package that failed")
