"""Laws of attention over sequences of different lengths, packed or in pages.

Where a law reorders sums it holds within twice the bound, else bit for bit. The output comes first,
an LSE, where there is one, second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.compare import ViolationError
from torch_ops.testing.laws import in_range, safe_exponents, scaled_pair
from torch_ops.testing.proof import Arguments, Law, Pair, Trial
from torch_ops.testing.proofs._attention import visible
from torch_ops.testing.proofs._ragged import Form, Run

NAMES = ("out", "lse")
Pairs = Sequence[Pair] | None
Statement = Callable[[Form, Trial], Pairs]


def equal(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Pair]:
    """Outputs that are equal bit for bit."""
    return [
        Pair(f"{name}, {what}", a, b)
        for name, a, b in zip(NAMES[: len(got)], got, expected, strict=True)
    ]


def close(
    trial: Trial,
    what: str,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    pick: Callable[[Tensor], Tensor] = lambda bound: bound,
) -> list[Pair]:
    """Outputs that differ by twice the bound at most; `pick` takes the bounds that belong there."""
    bounds = [e.bound for e in trial.expected]
    return [
        Pair(f"{name}, {what}", a, b, None if bound is None else 2 * pick(bound))
        for name, a, b, bound in zip(NAMES, got, expected, bounds, strict=False)
    ]


def seen(args: Arguments, run: Run) -> Tensor:
    """Which of its keys each query of a sequence attends to."""
    queries = run.rows.stop - run.rows.start
    causal = args.get("is_causal", False)
    return visible(queries, len(run.keys[0]), causal, args["window_left"])


def finite(form: Form, trial: Trial, *names: str) -> bool:
    """Whether what is read of these is finite."""
    return all(bool(read(form, trial, name).isfinite().all()) for name in names)


def read(form: Form, trial: Trial, name: str) -> Tensor:
    """What is read of queries, keys or values; the rest is zeros."""
    value: Tensor = trial.args[name]
    if name in form.queries:
        keep = torch.zeros(len(value), dtype=torch.bool, device=value.device)
        for run in form.runs(trial.args):
            keep[run.rows] = True
    else:
        keep = ~form.unread(trial.args)
    return value.masked_fill(~keep.view(*keep.shape, *[1] * (value.dim() - keep.dim())), 0)


def _negated_values(form: Form, trial: Trial) -> Pairs:
    got = trial.run(**{form.values: -trial.args[form.values]})
    return equal("values negated", got, (-trial.outputs[0], *trial.outputs[1:]))


def _scaled_values(form: Form, trial: Trial) -> Pairs:
    v = trial.args[form.values]
    if not in_range(read(form, trial, form.values), *safe_exponents(v.dtype)):
        return None
    got = trial.run(**{form.values: v * 8})
    return [
        scaled_pair("out, values times 8", got[0], trial.outputs[0], 3),
        *equal("values times 8", got, trial.outputs)[1:],
    ]


def _moved_scale(form: Form, trial: Trial) -> Pairs:
    """Products are the same bits; sums of them are too."""
    q, k = trial.args["q"], trial.args[form.keys]
    parts = [read(form, trial, name) for name in ("q", form.keys)]
    if not all(in_range(part, *safe_exponents(part.dtype)) for part in parts):
        return None
    return equal("8 q and k / 8", trial.run(q=q * 8, **{form.keys: k / 8}), trial.outputs)


def _negated_logits(form: Form, trial: Trial) -> Pairs:
    got = trial.run(q=-trial.args["q"], **{form.keys: -trial.args[form.keys]})
    return equal("q and k negated", got, trial.outputs)


def _unseen_keys(form: Form, trial: Trial) -> Pairs:
    """Finite garbage at keys that the first half of the queries can't see changes none of it."""
    if not finite(form, trial, form.keys, form.values):
        return None
    k, v = trial.args[form.keys].clone(), trial.args[form.values].clone()
    rows: list[int] = []
    for run in form.runs(trial.args):
        mask = seen(trial.args, run)
        half = (len(mask) + 1) // 2
        hidden = ~mask[:half].any(0).to(k.device)
        if half and bool(hidden.any()):
            index = tuple(part[hidden] for part in run.keys)
            k[index], v[index] = 3.0, -7.0
            rows += range(run.rows.start, run.rows.start + half)
    if not rows:
        return None
    got = trial.run(**{form.keys: k, form.values: v})
    kept = [o[rows] for o in got], [o[rows] for o in trial.outputs]
    return equal("keys it can't see changed", *kept)


def _masked_weight(form: Form, trial: Trial) -> Pairs:
    """With V the identity of each sequence the output is P: masked entries are exactly zero."""
    q, runs = trial.args["q"], form.runs(trial.args)
    most = max((len(run.keys[0]) for run in runs), default=0)
    masks = [seen(trial.args, run) for run in runs]
    if all(bool(m.all()) for m in masks) or not finite(form, trial, "q", form.keys):
        return None
    v = trial.args[form.values]
    eye = torch.full((*v.shape[:-1], most), torch.nan, dtype=q.dtype, device=q.device)
    shown = torch.zeros(len(q), most, dtype=torch.bool)
    for run, mask in zip(runs, masks, strict=True):
        count = len(run.keys[0])
        eye[run.keys] = torch.eye(most, dtype=q.dtype, device=q.device)[:count].unsqueeze(1)
        shown[run.rows, :count] = mask
    (p, *_) = trial.run(**{form.values: eye})
    hidden = p.masked_fill(shown.to(p.device).unsqueeze(1), 0)
    return [Pair("weights of masked keys", hidden, torch.zeros_like(p))]


def _constant_values(form: Form, trial: Trial) -> Pairs:
    """A convex combination of one value is that value, within the bound."""
    v = torch.full_like(trial.args[form.values], 0.75)
    expected = torch.zeros_like(trial.outputs[0])
    for run in form.runs(trial.args):
        some = seen(trial.args, run).any(-1).to(expected.device)
        expected[run.rows] = torch.where(some, 0.75, 0.0).to(v.dtype).view(-1, 1, 1)
    (got, *_) = trial.run(**{form.values: v})
    bound = form.oracle({**on_cpu(trial.args), form.values: v.cpu()}, trial.contract)[0].bound
    return [Pair("out of constant values", got, expected, bound)]


def on_cpu(args: Arguments) -> Arguments:
    """The same arguments, tensors on the CPU."""
    return {n: a.cpu() if isinstance(a, Tensor) else a for n, a in args.items()}


def _unread(form: Form, trial: Trial) -> Pairs:
    """Other content of what no sequence reads, and of padding, changes nothing."""
    args, changed = trial.args, dict[str, Any]()
    gap = form.unread(args)
    for junk, name in ((3.0, form.keys), (-7.0, form.values)):
        where = gap.view(*gap.shape, *[1] * (args[name].dim() - gap.dim()))
        changed[name] = args[name].masked_fill(where, junk)
    if "qo_indptr" in args:
        changed["q"] = args["q"].clone()
        changed["q"][int(args["qo_indptr"][-1]) :] = 2.0
    if "kv_indices" in args:
        changed["kv_indices"] = args["kv_indices"].clone()
        changed["kv_indices"][int(args["kv_indptr"][-1]) :] = 0
        pages = args["kv_indptr"][1:] - args["kv_indptr"][:-1]
        changed["kv_last_page_len"] = args["kv_last_page_len"].masked_fill(pages == 0, 1)
    if all(torch.equal(args[name], value) for name, value in changed.items()):  # NaN differs
        return None
    return equal("other content of what isn't read", trial.run(**changed), trial.outputs)


def reordered(form: Form, args: Arguments, order: Sequence[int]) -> tuple[Arguments, list[int]]:
    """Some of the sequences in another order, and the rows that their queries had."""
    found: dict[str, Any] = {}
    rows: list[int] = []
    runs = form.runs(args)
    for b in order:
        rows += range(runs[b].rows.start, runs[b].rows.stop)
    device = args["kv_indptr"].device
    found |= {name: args[name][rows] for name in form.queries}
    sizes = {"qo_indptr": [runs[b].rows.stop - runs[b].rows.start for b in order]}
    if "kv_indices" in args:
        table = args["kv_indptr"].tolist()
        entries = [i for b in order for i in range(table[b], table[b + 1])]
        found["kv_indices"] = args["kv_indices"][entries]
        found["kv_last_page_len"] = args["kv_last_page_len"][list(order)]
        sizes["kv_indptr"] = [table[b + 1] - table[b] for b in order]
    else:
        keys = torch.cat([runs[b].keys[0] for b in order])
        found |= {name: args[name][keys] for name in (form.keys, form.values)}
        sizes["kv_indptr"] = [len(runs[b].keys[0]) for b in order]
    for name in set(sizes) & set(form.tables):
        bounds = torch.tensor([0, *sizes[name]]).cumsum(0)
        found[name] = bounds.to(torch.int32).to(device)
    return {**args, **found}, rows


def _sequences(form: Form, trial: Trial) -> Pairs:
    """In reverse order, the last one with queries alone, and the first where all else is NaN."""
    runs = form.runs(trial.args)
    if len(runs) < 2:
        return None
    pairs: list[Pair] = []
    asked = [b for b, run in enumerate(runs) if run.rows.start < run.rows.stop]
    for what, order in (("reversed", range(len(runs))[::-1]), ("one alone", asked[-1:])):
        if order:
            args, rows = reordered(form, trial.args, order)
            base = [output[rows] for output in trial.outputs]
            pairs += close(trial, f"sequences: {what}", trial.run(**args), base, _taking(rows))
    if asked:
        first = runs[asked[0]]
        found = trial.run(**_all_else_nan(form, trial.args, first))
        kept = [o[first.rows] for o in found], [o[first.rows] for o in trial.outputs]
        pairs += equal("all that the first sequence doesn't read NaN", *kept)
    return pairs


def _all_else_nan(form: Form, args: Arguments, run: Run) -> Arguments:
    own = torch.zeros_like(form.unread(args))
    own[run.keys] = True
    changed = {}
    for name in (form.keys, form.values):
        other = ~own.view(*own.shape, *[1] * (args[name].dim() - own.dim()))
        changed[name] = args[name].masked_fill(other, torch.nan)
    return changed


def _alone(form: Form, trial: Trial) -> Pairs:
    """The same bits without the other sequences, by the same kernel."""
    runs = form.runs(trial.args)
    asked = [b for b, run in enumerate(runs) if run.rows.start < run.rows.stop]
    if len(runs) < 2 or not asked or trial.refuses(trial.args) is not None:
        return None
    pairs: list[Pair] = []
    for b in (asked[0], asked[-1]):
        args, rows = reordered(form, trial.args, [b])
        reason = trial.refuses(args)
        if reason is not None:
            detail = f"supports() takes {len(runs)} sequences, and refuses one of them: {reason}"
            raise ViolationError("batch_invariance", detail)
        base = [output[rows] for output in trial.outputs]
        pairs += equal(f"sequence {b} alone", trial.run(**args), base)
    return pairs


def _taking(rows: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda bound: bound[rows]


def _by_groups(x: Tensor, kv_heads: int) -> Tensor:
    """The heads in reverse order of the key heads that they read, on the axis before the last."""
    parts: Tensor = x.unflatten(1, (kv_heads, -1))
    return parts.flip(1).flatten(1, 2).contiguous()


def _heads(form: Form, trial: Trial) -> Pairs:
    kv_heads = trial.args[form.keys].shape[-2]
    if kv_heads < 2:
        return None
    changed = {n: trial.args[n].flip(-2).contiguous() for n in (form.keys, form.values)}
    got = trial.run(q=_by_groups(trial.args["q"], kv_heads), **changed)
    base = [_by_groups(output, kv_heads) for output in trial.outputs]
    return close(trial, "heads reversed", got, base, lambda b: _by_groups(b, kv_heads))


def _repeated_heads(form: Form, trial: Trial) -> Pairs:
    """Grouped queries against as many key heads, each repeated."""
    keys = (form.keys, form.values)
    group = trial.args["q"].shape[1] // trial.args[form.keys].shape[-2]
    if group < 2:
        return None
    got = trial.run(**{n: trial.args[n].repeat_interleave(group, -2) for n in keys})
    return close(trial, "key heads repeated", got, trial.outputs)


def _later_queries(form: Form, trial: Trial) -> Pairs:
    """The later half of each sequence's queries alone: they stand at the same keys."""
    runs, rows, sizes = form.runs(trial.args), list[int](), list[int]()
    for run in runs:
        first = (run.rows.start + run.rows.stop) // 2
        rows += range(first, run.rows.stop)
        sizes.append(run.rows.stop - first)
    if len(rows) == len(trial.args["q"]) or not rows:
        return None
    bounds = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(trial.args["q"].device)
    got = trial.run(q=trial.args["q"][rows], qo_indptr=bounds)
    base = [output[rows] for output in trial.outputs]
    return close(trial, "later queries alone", got, base, _taking(rows))


def _larger_bounds(form: Form, trial: Trial) -> Pairs:
    """Lengths that are larger than the longest sequence's cost time, and change nothing."""
    most = {n: trial.args[n] + 5 for n in ("max_qo_len", "max_kv_len")}
    return close(trial, "larger max_qo_len, max_kv_len", trial.run(**most), trial.outputs)


def _split_keys(form: Form, trial: Trial) -> Pairs:
    """Two halves of each sequence's keys, attended to alone, merged by their LSEs in float64.

    The merged output errs by what both parts err, weighted, and by what errors d of the LSEs move
    the weights: ``sum w_i b_i + expm1(2 d) sum w_i |o_i|``; the merged LSE errs by d. A part that
    is empty for a row is exact, and weighs nothing.
    """
    args, runs = trial.args, form.runs(trial.args)
    if args["is_causal"] or args["window_left"] >= 0 or not any(len(r.keys[0]) > 1 for r in runs):
        return None
    found, errors = [], []
    for half in (0, 1):
        keys = [r.keys[0].tensor_split(2)[half] for r in runs]
        bounds = torch.tensor([0, *map(len, keys)]).cumsum(0).to(torch.int32)
        part: dict[str, Any] = {n: args[n][torch.cat(keys)] for n in (form.keys, form.values)}
        part["kv_indptr"] = bounds.to(args["q"].device)
        found.append([output.cpu().double() for output in trial.run(**part)])
        expected = form.oracle(on_cpu({**args, **part}), trial.contract)
        errors.append([e.bound for e in expected if e.bound is not None])
    lse = torch.logaddexp(found[0][1], found[1][1])
    top = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.stack([torch.exp(s - top).unsqueeze(-1) for _, s in found])
    parts = torch.stack([o for o, _ in found])
    off = torch.stack([e[1] for e in errors]).amax(0)
    moved = torch.expm1(2 * off).unsqueeze(-1) * (weights * parts.abs()).sum(0)
    error = (weights * torch.stack([e[0] for e in errors])).sum(0)
    values = ((weights * parts).sum(0), lse), (error + moved, off)
    return [
        Pair(f"{name}, of halves of the keys merged", got.cpu().double(), value, bound + e.bound)
        for name, got, value, bound, e in zip(
            NAMES, trial.outputs, *values, trial.expected, strict=True
        )
        if e.bound is not None
    ]


UNREAD = ("unread", "what no sequence reads changes nothing, NaN or not", _unread)
SEQUENCES = ("sequences", "sequences of a batch don't know each other", _sequences)
ALONE = ("batch_invariance", "f(args) of a sequence is f of that sequence", _alone)
_LAWS: tuple[tuple[str, str, Statement], ...] = (
    ("negated_values", "f(q, k, -v) == -f(q, k, v)", _negated_values),
    ("scaled_values", "f(q, k, 8 v) == 8 f(q, k, v)", _scaled_values),
    ("moved_scale", "f(8 q, k / 8, v) == f(q, k, v)", _moved_scale),
    ("negated_logits", "f(-q, -k, v) == f(q, k, v)", _negated_logits),
    ("unseen_keys", "a query doesn't depend on keys that it can't see", _unseen_keys),
    ("masked_weight", "with V = 1, masked weights are exactly 0", _masked_weight),
    ("constant_values", "f(q, k, c) == c", _constant_values),
    UNREAD,
    SEQUENCES,
    ("heads", "heads don't know each other", _heads),
    ("repeated_heads", "grouped queries are queries with repeated key heads", _repeated_heads),
)
LATER_QUERIES = ("later_queries", "queries don't depend on earlier ones", _later_queries)
LARGER_BOUNDS = ("larger_bounds", "the lengths that are named are bounds", _larger_bounds)
SPLIT_KEYS = ("split_keys", "f(k, v) is the merge of f over parts of the keys", _split_keys)


def law(form: Form, name: str, statement: str, pairs: Statement, declared: str = "") -> Law:
    """A law of a form of attention."""
    return Law(name, statement, lambda trial: pairs(form, trial), declared)


def laws(form: Form, *others: tuple[str, str, Statement]) -> tuple[Law, ...]:
    """The laws of a form of attention of keys and values that are apart."""
    found = [law(form, *parts) for parts in (*_LAWS, *others)]
    return (*found, law(form, *ALONE, declared="batch_invariant"))
