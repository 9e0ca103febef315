"""Never imported: the backend isn't available."""

raise AssertionError("an unavailable backend's kernel was imported")
