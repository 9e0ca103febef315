"""The ops as Python callables: ``torch_ops.ops.rms_norm(x, weight, eps, backend="triton")``.

Each carries ``declaration`` and ``backends()``. This module holds callables and nothing else,
also under pytest, which adds two names to a module that it rewrites: PYTEST_DONT_REWRITE.
"""


def __getattr__(name):  # type: ignore[no-untyped-def]
    import difflib

    known = sorted(key for key in globals() if not key.startswith("_"))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"torch_ops.ops has no op {name!r}. Known: {', '.join(known)}.{hint}")
