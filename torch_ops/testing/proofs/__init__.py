"""One module per op, named as the op; shared parts begin with an underscore."""
