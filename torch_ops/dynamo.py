"""All use of private parts of Dynamo: code that it must not trace, and the policy guard.

Tested on every supported torch. Imports no part of ``torch._dynamo`` by itself.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame
from torch.fx import GraphModule

__all__ = [
    "depend",
    "evaluate",
    "expression",
    "finish",
    "follow",
    "forget",
    "graph_inputs",
    "keep_sizes",
    "mark_dynamic",
    "mark_static_address",
    "may_replay",
    "misplaced",
    "read_kept_sizes",
    "resembling",
    "skip",
    "traced_otherwise",
    "tracing",
    "watched",
]

_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
_ATTRIBUTE, _FOLLOWED = "_torch_ops_dependency", "_torch_ops_followed"
_SIZES = "_torch_ops_sizes"
_SCOPES = 256  # of which verdicts are kept
_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def skip(code: types.CodeType) -> None:
    """Keep Dynamo from tracing this code and what it calls; costs nothing a call."""
    _eval_frame.set_code_exec_strategy(code, _SKIP)


def resembling(tensors: Sequence[torch.Tensor | None]) -> Callable[..., bool] | None:
    """Make the comparison that guards compiled code: whether other tensors look like these.

    Args:
        tensors: The last ones may be None.

    Returns:
        A function of as many tensors: whether type, dispatch keys of this thread, dtype, device,
        shape, strides and ``requires_grad`` are the same, and no tensor comes twice. None where
        the tensors aren't like themselves, one coming twice, and where this PyTorch lacks it.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    count = len(present)
    sizes: Any = [list(tensor.shape) for tensor in present]
    strides: Any = [list(tensor.stride()) for tensor in present]
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *present,
            dynamic_dims_sizes=sizes,
            dynamic_dims_strides=strides,
        )
        check: Callable[..., bool] = guards.check

        def same(*others: torch.Tensor | None) -> bool:
            for other in others[count:]:
                if other is not None:
                    return False
            return check(*others[:count])

        matches = check if count == len(tensors) else same
        return matches if matches(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make a dimension dynamic from the first compile on, without importing Dynamo."""
    marked: set[int] = getattr(tensor, "_dynamo_weak_dynamic_indices", set())
    tensor._dynamo_weak_dynamic_indices = marked | {dim}  # type: ignore[attr-defined]


def mark_static_address(tensor: torch.Tensor) -> None:
    """Let CUDA graphs take an empty tensor as it is, without importing Dynamo.

    They copy their other inputs: with one on the CPU among them not all in one kernel, but one by
    one. Empty tensors have one address, none. What modules hold Dynamo marks itself.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def keep_sizes(tensor: torch.Tensor) -> None:
    """Keep a tensor's sizes for `read_kept_sizes`; those that are marked are at least 2."""
    tensor._torch_ops_sizes = tuple(tensor.shape)  # type: ignore[attr-defined]


def read_kept_sizes() -> str | None:
    """Have the frame that is being traced, if any, read sizes where `keep_sizes` put them.

    To be called after `depend`. Dynamo has a frame ask a tensor for each size that its graph takes
    by a call that is kept from being traced, 3 us on the host of an H200, and has guards ask in
    Python whether it is at least 2.

    Returns:
        None, or which private part this PyTorch lacks: sizes are read as Dynamo has it then.
    """
    return finish(_read_kept)


def _read_kept(module: GraphModule) -> None:
    try:
        from torch._dynamo.source import AttrSource, GetItemSource, TensorPropertySource
    except ImportError:  # read as Dynamo has it
        return
    inputs = [node.meta["grapharg"] for node in module.graph.find_nodes(op="placeholder")]
    tensors = {given.source: given for given in inputs}
    kept = getattr(_current_tracer().output, _ATTRIBUTE).kept
    for given in inputs:
        size = given.source
        if not isinstance(size, TensorPropertySource) or size.prop.method_name() != "size":
            continue
        if size.base in tensors and hasattr(tensors[size.base].example, _SIZES):
            given.source = GetItemSource(AttrSource(size.base, _SIZES), size.idx)
            kept.append(expression(given.example))


def _unbound(symbols: Sequence[Any], builder: Any) -> None:
    """Spare a frame the guards by which sizes are at least 2; they are made after the others."""
    try:
        shapes = builder.check_fn_manager.output_graph.shape_env
        ranges, unknown = shapes.var_to_range, shapes._default_unspecified_value_range()
    except AttributeError:  # the frame asks in vain
        return
    ranges.update(dict.fromkeys(symbols, unknown))


def traced_otherwise() -> bool:
    """Whether this thread traces in another way than Dynamo, as a non-strict export does.

    Asked where `torch.compiler.is_dynamo_compiling`, a constant of traced code, is False:
    `torch.compiler.is_compiling` is a flag of the whole process, and another thread may compile.
    """
    return torch.compiler.is_compiling() and (tracing() or _modes() > 0)


def watched(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor's data would fail or be recorded: a fake one, or under a mode."""
    return type(tensor) is not torch.Tensor or _modes() > 0


skip(traced_otherwise.__code__)  # compiled by itself it would be a constant


class _Verdicts(dict[Hashable, bool]):
    """Whether what a traced frame depends on is as it was, by the scope of the call.

    The guard is the look-up itself: it runs no Python where a verdict is known. `forget` empties
    all at a change.

    Another thread may change what it depends on while the frame is being compiled. The call that
    compiles it runs it nevertheless, as if it had come before the change: Dynamo takes a guard that
    fails at once for a fault of its own. Later calls don't: it may be made of old and new parts.
    """

    def __init__(self, generation: Callable[[], int]) -> None:
        self._generation = generation
        self._compile_id, self._mixed = _compile_id(), False
        self._wanted: dict[Hashable, tuple[Callable[[], Hashable], Hashable]] = {}
        self.kept: list[Any] = []  # symbols of sizes that need no guard
        _verdicts[id(self)] = self

    def add(self, key: Hashable, snapshot: Callable[[], Hashable]) -> None:
        if key not in self._wanted:
            self._wanted[key] = (snapshot, snapshot())

    def is_compiled(self) -> None:
        """Nothing of the frame is made by what is chosen after this."""
        self._mixed = not self._unchanged()

    def __missing__(self, scope: Hashable) -> bool:
        while True:
            made_in = self._generation()
            verdict = not self._mixed and self._unchanged()
            if not verdict and self._compile_id is not None and _compile_id() == self._compile_id:
                return True
            if len(self) > _SCOPES:
                self.clear()
            self[scope] = verdict
            if self._generation() == made_in:  # else a change came in between, and its `forget`
                return verdict
            self.pop(scope, None)

    def _unchanged(self) -> bool:
        return all(snapshot() == wanted for snapshot, wanted in self._wanted.values())


_verdicts: weakref.WeakValueDictionary[int, _Verdicts] = weakref.WeakValueDictionary()


def forget() -> None:
    """Have the guards of compiled code look at the policy again: it has changed."""
    for reference in _verdicts.valuerefs():
        verdicts = reference()
        if verdicts is not None:
            verdicts.clear()


def _compile_id() -> object:
    """Name the frame that this thread is compiling, from its trace to the check of its guards."""
    try:
        return torch._guards.CompileContext.current_compile_id()
    except AttributeError:
        return None


def _current_tracer() -> Any:
    if "torch._dynamo.symbolic_convert" not in sys.modules:
        return None
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # how Dynamo says that nothing is being traced
        return None


def tracing() -> bool:
    """Whether Dynamo is tracing in this thread, as it does when it runs a fake."""
    return _current_tracer() is not None


def misplaced(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
    """Whether Inductor would write a tensor of the frame that is being traced in a wrong place.

    So it is where other arguments share its storage and an offset there varies: it takes that for
    0 (pytorch#198068).
    """
    if _current_tracer() is None:
        return False
    shared = [argument for argument in arguments if _is_alias_of(tensor, argument)]
    return len(shared) > 1 and any(not isinstance(x.storage_offset(), int) for x in shared)


def depend(
    key: Hashable, snapshot: Callable[[], Hashable], generation: Callable[[], int]
) -> str | None:
    """Make the frame that is being traced, if any, recompile when a snapshot changes.

    A snapshot may change with the scope of the call, or at a change after which the generation is
    another and `forget` is called.

    Args:
        key: Names the dependency; one frame notes each key once.
        snapshot: Gives the value that the compiled code is valid for.
        generation: Counts changes.

    Returns:
        None, or which private part this PyTorch lacks: the frame then has no guard.
    """
    tracer = _current_tracer()
    if tracer is None:
        return None
    verdicts = getattr(tracer.output, _ATTRIBUTE, None)
    if verdicts is None:
        verdicts = _Verdicts(generation)
        setattr(tracer.output, _ATTRIBUTE, verdicts)
        try:
            _install(tracer, verdicts)
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
    verdicts.add(key, snapshot)
    return None


def finish(change: Callable[[GraphModule], None]) -> str | None:
    """Have a function change the graph of the frame that is being traced before it is compiled.

    Args:
        change: Called once, however often it is given.

    Returns:
        None, or which private part this PyTorch lacks: nothing changes the graph then.
    """
    tracer = _current_tracer()
    if tracer is None:
        return None
    try:
        changes = tracer.output.register_finalizer_fns
        if change not in changes:
            tracer.output.add_graph_finalizer(change)
    except AttributeError as error:
        return f"{type(error).__name__}: {error}"
    return None


def follow(
    found: Callable[[GraphModule, Any], Callable[[dict[str, Any], str], None]],
) -> str | None:
    """Tell of the graphs of the frame that is being traced, and where it will find their code.

    To be called after `finish`, whose changes are then seen.

    Args:
        found: Called with a graph, before it is compiled, and its compiler. What it gives is
            called with the globals of the frame and the name there of the compiled function.

    Returns:
        None, or which private part this PyTorch lacks: nothing is told then.
    """
    tracer = _current_tracer()
    if tracer is None:
        return None
    output = tracer.output
    if getattr(output, _FOLLOWED, None) is found:
        return None
    waiting: list[Callable[[dict[str, Any], str], None]] = []
    try:
        install, compiler = output.install_global_unsafe, output.compiler_fn
        scope: dict[str, Any] = output.global_scope
        output.add_graph_finalizer(lambda graph: waiting.append(found(graph, compiler)))
    except AttributeError as error:
        return f"{type(error).__name__}: {error}"

    def installed(name: str, value: Any) -> None:
        install(name, value)
        if waiting and name.startswith("__compiled_fn"):
            del output.install_global_unsafe  # ends a cycle that would keep the graph's tensors
            waiting.pop()(scope, name)

    output.install_global_unsafe = installed
    setattr(output, _FOLLOWED, found)
    return None


def graph_inputs(graph: torch.fx.Graph) -> list[Any]:
    """Give what stands for each input of a graph of Dynamo's: a fake tensor, a symbol, a number."""
    inputs = [node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder"]
    return list(map(expression, inputs))


def expression(value: Any) -> Any:
    """Give the formula of a size over a graph's symbols; anything else as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def evaluate(value: Any, sizes: Mapping[Any, int]) -> Any:
    """Give what a formula is where a graph's symbols are numbers; anything else as it is.

    Raises:
        LookupError: a symbol isn't among them.
    """
    if not hasattr(value, "free_symbols"):
        return value
    lacking = [str(symbol) for symbol in value.free_symbols if symbol not in sizes]
    if lacking:
        raise LookupError(f"size {value} isn't an input of the graph")
    return int(value.xreplace(sizes))


def may_replay(compiler: Any) -> bool:
    """Whether a compiler of Dynamo's graphs has PyTorch's CUDA graphs replay what it makes."""
    if getattr(compiler, "__name__", None) == "cudagraphs":
        return True
    describe = getattr(compiler, "get_compiler_config", None)
    config = describe() if describe is not None else None
    return bool(config and config.get("triton.cudagraphs"))


def _install(tracer: Any, verdicts: _Verdicts) -> None:
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.builder import install_guard  # type: ignore[attr-defined]

    def create(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        text = ["torch_ops: the chosen backends are those of the compile"]
        verdicts.is_compiled()
        try:
            manager.add_lambda_guard(verdicts.__getitem__, text)
        except TypeError:  # a third argument, the user's stack, came with torch 2.12
            manager.add_lambda_guard(verdicts.__getitem__, text, None)
        _unbound(verdicts.kept, builder)

    policy = tracer.import_source("torch_ops.policy")
    source = CallFunctionNoArgsSource(AttrSource(policy, "current_scope"))
    install_guard(source.make_guard(create))


def tag_caches(fingerprint: Callable[[], str]) -> None:
    """Put the fingerprint into ``torch.compiler.config.cache_key_tag``, after the user's tag.

    PyTorch's on-disk caches know nothing of an op's schema, fake or decomposition.
    """
    config = torch.compiler.config
    tag = config.cache_key_tag
    mark = f"torch_ops:{fingerprint()}"
    if mark not in tag.split("|"):
        kept = [part for part in tag.split("|") if part and not part.startswith("torch_ops:")]
        config.cache_key_tag = "|".join([*kept, mark])
