"""Laws of a paged cache: where a page is, and how large pages are, is nothing to attention."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops.testing.proof import Trial
from torch_ops.testing.proofs._ragged import Form
from torch_ops.testing.proofs._ragged_laws import Pairs, close, equal


def _moved_pages(form: Form, trial: Trial) -> Pairs:
    """All pages in reverse order in the pool, and the table with them."""
    args, pool = trial.args, trial.args[form.keys].shape[0]
    if pool < 2:
        return None
    changed = {n: args[n].flip(0) for n in (form.keys, form.values)}
    used = int(args["kv_indptr"][-1])
    table = args["kv_indices"].clone()
    table[:used] = pool - 1 - table[:used]
    return equal("pages moved", trial.run(kv_indices=table, **changed), trial.outputs)


def _as_one_page(form: Form, trial: Trial) -> Pairs:
    """Each sequence in a page of its own: the packed rows, as dense as they get."""
    args, runs = trial.args, form.runs(trial.args)
    most = max((len(run.keys[0]) for run in runs), default=0)
    if not most:
        return None
    device = args["kv_indptr"].device

    def paged(cache: Tensor) -> Tensor:
        pages = cache.new_full((len(runs), most, *cache.shape[2:]), torch.nan)
        for page, run in zip(pages, runs, strict=True):
            page[: len(run.keys[0])] = cache[run.keys]
        return pages

    lengths = torch.tensor([len(run.keys[0]) for run in runs], dtype=torch.int32)
    bounds = torch.tensor([0, *(lengths > 0).tolist()]).cumsum(0).to(torch.int32)
    got = trial.run(
        kv_indptr=bounds.to(device),
        kv_indices=lengths.nonzero().flatten().to(torch.int32).to(device),
        kv_last_page_len=lengths.to(device),
        **{n: paged(args[n]) for n in (form.keys, form.values)},
    )
    return close(trial, "each sequence in one page", got, trial.outputs)


MOVED_PAGES = ("moved_pages", "f doesn't depend on where pages are", _moved_pages)
ONE_PAGE = ("one_page", "f doesn't depend on the size of pages: it is that of packed rows",
            _as_one_page)  # fmt: skip
