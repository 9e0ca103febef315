"""A backend whose kernels disagree with the declarations, each in its own way."""
