"""`AttentionMetadata`: bounds and page table of one step, at addresses that graphs may keep."""

from __future__ import annotations

import contextvars
import copy
import itertools
import operator
import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from torch_ops import dynamo, once
from torch_ops.errors import CaptureError, NotPreparedError, TorchOpsError

if TYPE_CHECKING:
    from torch_ops.attention.prepared import PreparedAttention

__all__ = ["AttentionMetadata", "Kind", "Tables", "find", "most"]

Kind = Literal["dense", "ragged", "paged"]
Pages = Sequence[Sequence[int]]
_OFFSET = 2  # 0 and 1 are specialised by PyTorch
_MOST = 2**31 - 1  # tables are int32
_PRODUCT = 2**42  # of bounds; times an id it is the size of a tensor, which has to fit 63 bits
_ids = itertools.count(1_000_003)  # apart from those of layers: equal sizes share a symbol
_by_id: weakref.WeakValueDictionary[int, AttentionMetadata] = weakref.WeakValueDictionary()


class Tables(NamedTuple):
    """What a kernel reads of a step.

    Attributes:
        qo_indptr: ``[B + 1]`` int32, where each sequence's queries begin.
        kv_indptr: ``[B + 1]`` int32, where each sequence's keys begin, or its pages in
            ``kv_indices``.
        kv_indices: ``[max_pages]`` int32, None for ragged calls.
        kv_last_page_len: ``[B]`` int32, None for ragged calls.
        max_qo_len: At least the queries of the longest sequence.
        max_kv_len: At least the keys of the longest sequence.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor | None
    kv_last_page_len: Tensor | None
    max_qo_len: int
    max_kv_len: int

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one query, or none and a row of padding."""
        return self.kv_indices is not None and self.max_qo_len == 1


class AttentionMetadata:
    """Lengths of a step's sequences and, for a paged cache, their pages.

    Made once for each size of batch by `ragged` or `paged`; `plan` then gives it the numbers of
    the next step where they are, also between replays of a CUDA graph, and plans what backends
    keep for it.

    Attributes:
        kind: ``"ragged"`` or ``"paged"``.
        tables: The device's tensors, and the bounds of lengths.
        host: The same numbers on the host, as planned last; pages no more than there are.
        page_size: Tokens of a page, None for ragged calls.
        query_lens: Queries of each sequence, as planned last.
        kv_lens: Keys of each sequence, as planned last.
        judged: Calls whose tensors were found to fit these numbers.
    """

    def __init__(
        self,
        batch: int,
        max_query_len: int,
        max_kv_len: int,
        device: torch.device | str,
        page_size: int | None = None,
        num_pages: int = 0,
        max_pages: int = 0,
    ) -> None:
        self.kind: Kind = "ragged" if page_size is None else "paged"
        self.page_size = page_size
        self.query_lens: tuple[int, ...] = ()
        self.kv_lens: tuple[int, ...] = ()
        self.judged: set[Hashable] = set()
        self._batch, self._num_pages, self._max_pages = batch, num_pages, max_pages
        self._plans: dict[Hashable, tuple[PreparedAttention, Any]] = {}
        self._bounds = max_query_len, max_kv_len
        size = 2 * (batch + 1) + (0 if page_size is None else batch)
        with torch.inference_mode(False):  # else no later plan could write them outside of it
            self._numbers = torch.zeros(size, dtype=torch.int32, device="cpu")
            self._buffer = torch.zeros(size + max_pages, dtype=torch.int32, device=device)
        self.host, self.tables = self._split(self._numbers), self._split(self._buffer)
        self._name()

    def _name(self) -> None:
        """Take an id, by which graphs know this object."""
        number = next(_ids)
        shape = (number, *(bound + _OFFSET for bound in self._bounds), 0)
        with torch.inference_mode(False):
            # Strides of its sizes would be compared before each call of a compiled layer.
            self._step = torch.empty_strided(shape, (1, 1, 1, 1), device="cpu", dtype=torch.float32)
        for dim in range(3):
            dynamo.mark_dynamic(self._step, dim)
        dynamo.mark_static_address(self._step)
        dynamo.keep_sizes(self._step)
        _by_id[number] = self

    def __getstate__(self) -> dict[str, Any]:
        """Leave to the original what is its own: its name, and what backends planned for it."""
        own = ("_step", "_plans", "judged", "tables", "host")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _plans={}, judged=set())
        if self._buffer.is_inference():  # copied in inference mode
            with torch.inference_mode(False):
                self._buffer = self._buffer.clone()
        self.host, self.tables = self._split(self._numbers), self._split(self._buffer)
        self._name()

    @classmethod
    def ragged(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str,
        max_query_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> AttentionMetadata:
        """Describe packed queries ``[T, H, D]`` and keys and values ``[N, K, D]``.

        Args:
            query_lens: Queries of each sequence; their number is the batch of later plans, too.
            kv_lens: Keys of each sequence; default as many as queries.
            device: Where the layer runs.
            max_query_len: The most queries of a sequence that a plan may name; default those here.
            max_kv_len: The most keys of a sequence that a plan may name; default those here.

        Raises:
            TypeError: what should be a whole number is none.
            ValueError: lengths are negative, or their numbers differ.
        """
        lens = _lengths("query_lens", query_lens)
        keys = lens if kv_lens is None else _lengths("kv_lens", kv_lens)
        made = cls(len(lens), *_bounds(max_query_len, lens, max_kv_len, keys), device)
        made.plan(lens, keys)
        return made

    @classmethod
    def paged(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        pages: Pages,
        *,
        page_size: int,
        num_pages: int,
        device: torch.device | str,
        max_query_len: int | None = None,
        max_kv_len: int | None = None,
        max_pages: int | None = None,
    ) -> AttentionMetadata:
        """Describe packed queries ``[T, H, D]`` and caches ``[P, page_size, K, D]``.

        Args:
            query_lens: Queries of each sequence; their number is the batch of later plans, too.
                One each, and ``max_query_len`` 1, is a decode step.
            kv_lens: Keys of each sequence, those of its queries included.
            pages: Pages of each sequence, in the order of its tokens.
            page_size: Tokens of a page.
            num_pages: Pages P of the cache.
            device: Where the layer runs.
            max_query_len: The most queries of a sequence that a plan may name; default those here.
            max_kv_len: The most keys of a sequence that a plan may name; default those here.
            max_pages: The most pages of all sequences that a plan may name; default those here.

        Raises:
            TypeError: what should be a whole number is none.
            ValueError: numbers are out of range, or lengths and pages disagree.
        """
        size, pool = _number("page_size", page_size, 1), _number("num_pages", num_pages)
        lens, keys = _lengths("query_lens", query_lens), _lengths("kv_lens", kv_lens)
        bounds = _bounds(max_query_len, lens, max_kv_len, keys)
        needed = sum(-(-max(length, 0) // size) for length in keys)
        total = _number("max_pages", needed if max_pages is None else max_pages)
        made = cls(len(lens), *bounds, device, size, pool, total)
        made.plan(lens, keys, pages)
        return made

    def plan(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], pages: Pages | None = None
    ) -> None:
        """Take the numbers of the next step; the batch may be smaller, the rest is empty then.

        On a GPU this is queued on the current stream, where what ran before still reads the old
        numbers; other streams have to wait for it.

        Args:
            query_lens: Queries of each sequence.
            kv_lens: Keys of each sequence.
            pages: Pages of each sequence; None for ragged calls.

        Raises:
            TypeError: what should be a whole number is none; nothing changes.
            ValueError: numbers are out of range or beyond what was allocated; nothing changes.
            CaptureError: a stream is capturing.
        """
        if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise():
            raise TorchOpsError("AttentionMetadata.plan can't happen inside traced code")
        if once.capturing():
            raise CaptureError(
                "AttentionMetadata.plan is refused while a stream is capturing; plan before"
            )
        lens = self._checked(query_lens, "query_lens"), self._checked(kv_lens, "kv_lens")
        rest = self._batch - len(lens[0])
        if len(lens[0]) != len(lens[1]):
            _refuse("kv_lens", f"of {len(lens[1])} sequences", f"{len(lens[0])}, as query_lens")
        listed = self._checked_pages(lens[1], pages)
        bounds = [_indptr(lens[0], rest)]
        if pages is None:
            bounds.append(_indptr(lens[1], rest))
        else:
            size = self.page_size or 1
            bounds.append(_indptr([len(own) for own in pages], rest))
            tails = [(length - 1) % size + 1 if length else 0 for length in lens[1]]
            bounds.append(array("i", [*tails, *[0] * rest]))
        for part in (*bounds[1:], listed):
            bounds[0].extend(part)
        numbers = self._staged(torch.frombuffer(bounds[0], dtype=torch.int32))
        before = self._numbers, self.query_lens, self.kv_lens
        try:
            self._take(numbers, *lens)
        except BaseException:
            self._take(*before)
            raise

    def _staged(self, numbers: Tensor) -> Tensor:
        """Put numbers where a GPU copies them from while the host goes on.

        They are new at each plan, so that none is overwritten which is still to be copied.
        """
        return numbers.pin_memory() if self._buffer.is_cuda else numbers

    def _take(self, numbers: Tensor, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
        """Put numbers where graphs read them, and plan what backends keep for them."""
        self._numbers, self.query_lens, self.kv_lens = numbers, query_lens, kv_lens
        self.host, self.judged = self._split(numbers), set()
        self._buffer[: numbers.numel()].copy_(numbers, non_blocking=True)
        for prepared, state in self._plans.values():
            prepared.plan(self, state)

    def _split(self, buffer: Tensor) -> Tables:
        """See a step's numbers, one after another, as tables."""
        batch, paged = self._batch, self.kind == "paged"
        sizes = [batch + 1, batch + 1, batch if paged else 0]
        qo_indptr, kv_indptr, last, indices = buffer.split([*sizes, buffer.numel() - sum(sizes)])
        table = (indices, last) if paged else (None, None)
        return Tables(qo_indptr, kv_indptr, table[0], table[1], *self._bounds)

    @property
    def pool(self) -> tuple[int, int]:
        """Pages of the cache, and tokens of a page."""
        return self._num_pages, self.page_size or 0

    def __copy__(self) -> AttentionMetadata:
        """A copy has a buffer of its own, too."""
        return copy.deepcopy(self)

    def _checked(self, lens: Sequence[int], name: str) -> tuple[int, ...]:
        most = self.tables.max_qo_len if name == "query_lens" else self.tables.max_kv_len
        numbers = _lengths(name, lens)
        if len(numbers) > self._batch:
            _refuse(name, f"of {len(numbers)} sequences", f"at most {self._batch}, as allocated")
        if not all(0 <= number <= most for number in numbers):
            _refuse(name, list(numbers), f"lengths from 0 to {most}, as allocated")
        if self.kind == "ragged" or name == "query_lens":
            _number(f"sum({name})", sum(numbers))
        return numbers

    def _checked_pages(self, kv_lens: tuple[int, ...], pages: Pages | None) -> array[int]:
        if (pages is None) == (self.kind == "paged"):
            _refuse("pages", pages, "lists of pages" if pages is None else "None for ragged calls")
        listed = array("i")
        if pages is None:
            return listed
        size = self.page_size or 1
        if not hasattr(pages, "__len__"):
            _refuse("pages", repr(pages), "lists of pages", kind=TypeError)
        if len(pages) != len(kv_lens):
            _refuse("pages", f"of {len(pages)} sequences", f"{len(kv_lens)}, as kv_lens")
        index, own = 0, pages[0] if len(pages) else ()
        try:
            for index, (own, length) in enumerate(zip(pages, kv_lens, strict=True)):
                if len(own) != -(-length // size):
                    accepted = f"{-(-length // size)} pages of {size} tokens for {length} keys"
                    _refuse(f"pages[{index}]", f"of {len(own)} pages", accepted)
                # One like it is copied as a whole: a step of 64 x 2048 tokens lists 8192 pages.
                alike = isinstance(own, array) and own.typecode == listed.typecode
                listed.extend(own if alike else iter(own))
        except (TypeError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            _refuse(f"pages[{index}]", repr(own), f"pages 0 to {self._num_pages - 1}", kind=kind)
        if len(listed) > self._max_pages:
            _refuse("pages", f"of {len(listed)} pages", f"at most {self._max_pages}, as allocated")
        if listed and not _all_below(listed, self._num_pages):
            wrong = next(page for page in listed if not 0 <= page < self._num_pages)
            _refuse("pages", f"with page {wrong}", f"pages 0 to {self._num_pages - 1}")
        return listed

    def planned(self, prepared: PreparedAttention) -> Any:
        """Give what a backend has planned for these numbers; plans it at the first call.

        Raises:
            CaptureError: it isn't planned yet, and a stream is capturing.
        """
        found = self._plans.get(prepared.plan_key)
        if found is None:
            if once.capturing():
                raise CaptureError(
                    f"Attention backend {prepared.backend.value!r} has no plan for this metadata, "
                    "and a stream is capturing; prepare first: run the layer once before"
                )
            found = prepared, _apart(lambda: prepared.plan(self, None), self._buffer.device)
            self._plans[prepared.plan_key] = found
        return found[1]


def _apart(plan: Callable[[], Any], device: torch.device) -> Any:
    """Plan in a thread of its own: its memory mustn't be that of a graph that is warmed up.

    Inductor gives what a thread allocates before a recording to the graph, and keeps account of it.
    """

    def planned() -> Any:
        torch.cuda.synchronize(device)  # the numbers come by another stream
        with torch.no_grad(), torch.cuda.device(device):
            made = plan()
        torch.cuda.synchronize(device)  # other streams may read it next
        return made

    if device.type != "cuda":
        with torch.inference_mode(False):  # as in a new thread: later plans write what is made now
            return plan()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, planned).result()


def find(step: Tensor) -> AttentionMetadata:
    """Give the metadata that a tensor names in a graph."""
    metadata = _by_id.get(step.shape[0])
    if metadata is None:
        raise NotPreparedError(
            f"Attention: no metadata has the id {step.shape[0]}; a compiled graph is used after "
            "its metadata was deleted, or in another process"
        )
    return metadata


def most(step: Tensor) -> tuple[int, int]:
    """Give the bounds of query and key lengths that a tensor carries in a graph."""
    return step.shape[1] - _OFFSET, step.shape[2] - _OFFSET


def _number(name: str, value: object, least: int = 0) -> int:
    """Give a number that fits tables as an int, whatever counts as one."""
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        _refuse(name, repr(value), "an int", kind=TypeError)
    if not least <= number <= _MOST:
        _refuse(name, number, f"an int from {least} to {_MOST}")
    return number


def _lengths(name: str, lens: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, lens))
    except TypeError:
        _refuse(name, repr(lens), "whole numbers", kind=TypeError)


def _bounds(
    max_query_len: int | None, lens: Sequence[int], max_kv_len: int | None, keys: Sequence[int]
) -> tuple[int, int]:
    """Give the bounds of later plans: those given, else what is longest now."""
    queries = max((0, *lens)) if max_query_len is None else max_query_len
    most = max((0, *keys)) if max_kv_len is None else max_kv_len
    bounds = _number("max_query_len", queries), _number("max_kv_len", most)
    if (bounds[0] + _OFFSET) * (bounds[1] + _OFFSET) > _PRODUCT:
        accepted = f"at most {_PRODUCT // (bounds[0] + _OFFSET)} beside max_query_len {bounds[0]}"
        _refuse("max_kv_len", bounds[1], accepted)
    return bounds


def _all_below(numbers: array[int], end: int) -> bool:
    least, most = torch.frombuffer(numbers, dtype=torch.int32).aminmax()
    return bool(least >= 0) and bool(most < end)


def _indptr(lens: Sequence[int], rest: int) -> array[int]:
    bounds = array("i", itertools.accumulate(lens, initial=0))
    bounds.extend([bounds[-1]] * rest)
    return bounds


def _refuse(
    argument: str, received: object, accepted: str, *, kind: type[Exception] = ValueError
) -> NoReturn:
    raise kind(f"AttentionMetadata: argument {argument!r} is {received} (accepted: {accepted})")
