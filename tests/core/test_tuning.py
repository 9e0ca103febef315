"""Tables of measured times: what they decide, when they are refused, and what follows a change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_ops
from torch_ops import (
    Backend,
    Platform,
    TorchOpsError,
    TuningTableError,
    buckets,
    calls,
    ops,
    policy,
    runtime,
    tuning,
)
from torch_ops.declarations import catalogue

from .conftest import Python
from .toy import Toy

CPU = Platform.cpu()
VALUES = {"torch": 1.0, "inductor": 2.0, "triton": 3.0}
SMALL, LARGE = "x float32[2, 3], n 1", "x float32[8, 3], n 1"
Save = Callable[..., Path]
US = Mapping[str, float]


@pytest.fixture
def served(toy: Toy) -> Toy:
    """The op with three backends that are all usable, in the order torch, inductor, triton."""
    for backend, value in VALUES.items():
        toy.serve(backend, value)
    return toy


@pytest.fixture
def save(served: Toy, tmp_path: Path) -> Iterator[Save]:
    """Write a table of ``toy`` for this machine's CPU; keywords change what it says."""

    def saved(times: Mapping[str, US], name: str = "table.json", **changes: Any) -> Path:
        rows = [tuning.Row(bucket, us) for bucket, us in times.items()]
        data = tuning.written(tuning.device_name(CPU), {"toy": rows})
        path = tmp_path / name
        path.write_text(json.dumps(data | changes))
        return path

    yield saved
    torch_ops.clear_tuning_table()


def run(rows: int = 2) -> float:
    return float(ops.toy(torch.ones(rows, 3))[0, 0])


def test_the_fastest_of_the_bucket_runs_and_other_buckets_keep_the_order(save: Save) -> None:
    """Again and again: calls that look alike take a short way from the second one on."""
    torch_ops.load_tuning_table(
        save({SMALL: {"torch": 9.0, "triton": 2.0, "inductor": 5.0}, LARGE: {"inductor": 1.0}})
    )
    for _ in range(4):
        assert [run(n) for n in (2, 7, 8, 5, 3, 16)] == [3.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    for _ in range(3):
        assert float(torch.ops.torch_ops.toy(torch.ones(2, 1, 3))[0, 0, 0]) == 3.0
    torch_ops.clear_tuning_table()
    assert [run(n) for n in (2, 7)] == [1.0, 1.0]


def test_no_call_looks_a_row_up_that_looks_like_one_before(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ops.load_tuning_table(save({SMALL: {"triton": 1.0}, LARGE: {"inductor": 1.0}}))
    compiled = torch.ops.torch_ops_compiled.toy.default

    def values() -> list[float]:
        found = [run(2), run(7), run(16)]
        return found + [float(compiled(torch.ones(n, 3), 1)[0, 0]) for n in (2, 7, 16)]

    for _ in range(4):
        values()
    monkeypatch.setattr(buckets, "bucket", None)
    monkeypatch.setattr(tuning, "decides", None)
    for _ in range(3):
        assert values() == [3.0, 2.0, 1.0] * 2
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(3)


def test_no_call_is_looked_at_where_all_rows_prefer_what_is_declared_first(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(*_: object) -> None:
        raise AssertionError("a call was looked at")

    compiled = torch.ops.torch_ops_compiled.toy.default
    agrees = save({SMALL: {"torch": 1.0, "triton": 2.0}, LARGE: {"inductor": 1.0, "torch": 1.01}})
    torch_ops.load_tuning_table(agrees)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_by_look", looked)
        assert [float(compiled(torch.ones(n, 3), 1)[0, 0]) for n in (2, 7, 16)] == [1.0] * 3
        other = save({SMALL: {"torch": 1.0}, LARGE: {"inductor": 1.0, "torch": 1.1}}, "other.json")
        torch_ops.load_tuning_table(other)
        with pytest.raises(AssertionError, match="looked at"):
            compiled(torch.ones(2, 3), 1)
    torch_ops.load_tuning_table(agrees)
    with torch_ops.trace() as seen:  # tells them apart
        compiled(torch.ones(2, 3), 1)
        compiled(torch.ones(16, 3), 1)
    assert {(r.backend.value, r.source) for r in seen.records} == {
        ("torch", "tuned"), ("torch", "declared"),
    }  # fmt: skip


def test_calls_are_looked_at_where_the_first_kernel_may_refuse_some(
    toy: Toy, tmp_path: Path
) -> None:
    """What stands in for it is the next of the row, not of the declared order."""
    toy.serve("torch", 1.0, supports=lambda x, n: None if n == 1 else f"n {n} (supported: 1)")
    toy.serve("inductor", 2.0)
    toy.serve("triton", 3.0)
    us = {"torch": 1.0, "triton": 2.0, "inductor": 3.0}
    rows = [tuning.Row(f"x float32[2, 3], n {n}", us) for n in (1, 2)]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.written(tuning.device_name(CPU), {"toy": rows})))
    torch_ops.load_tuning_table(path)
    compiled = torch.ops.torch_ops_compiled.toy.default
    assert [float(compiled(torch.ones(2, 3), n)[0, 0]) for n in (1, 2, 3)] == [1.0, 3.0, 2.0]
    torch_ops.clear_tuning_table()


def test_others_come_in_the_declared_order_after_the_measured_ones(save: Save) -> None:
    torch_ops.load_tuning_table(save({SMALL: {"triton": 2.0}}))
    found = torch_ops.explain("toy", torch.ones(2, 3))
    assert [c.backend.value for c in found.candidates] == ["triton", "torch", "inductor"]
    assert (found.chosen, found.source) == (Backend.TRITON, "tuned")
    assert torch_ops.select_kernel("toy", args=(torch.ones(2, 3),)).backend is Backend.TRITON
    assert torch_ops.select_kernel("toy").backend is Backend.TORCH  # no arguments, no bucket
    with torch_ops.trace() as seen:
        run()
    assert [(r.backend, r.source) for r in seen.records] == [(Backend.TRITON, "tuned")]


def test_predicates_policies_and_scopes_win(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.serve("torch", 1.0)
    toy.serve("inductor", 2.0)
    toy.serve("triton", 3.0, supports=lambda x, n: None if n == 1 else f"n {n} (supported: 1)")
    toy.serve("aiter", 5.0)  # no declared order names it
    rows = [
        tuning.Row("x float32[2, 3], n 1", {"aiter": 0.5, "triton": 1.0, "inductor": 2.0}),
        tuning.Row("x float32[2, 3], n 2", {"triton": 1.0, "inductor": 2.0}),
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.written(tuning.device_name(CPU), {"toy": rows})))
    torch_ops.load_tuning_table(path)
    assert (toy(), toy(n=2), toy(n=3)) == (3.0, 2.0, 1.0)
    assert toy("torch") == 1.0
    with torch_ops.use_backend("inductor"):
        assert toy() == 2.0
    undo = torch_ops.set_backend(toy="torch")
    assert toy() == 1.0
    undo()
    assert toy() == 3.0
    monkeypatch.setenv("TORCH_OPS_DISABLE", "toy:triton")
    torch_ops.refresh()
    assert toy() == 2.0


def test_what_ties_with_the_fastest_goes_by_the_declared_order(save: Save, served: Toy) -> None:
    """Two captures of one kernel differ by as much; Inductor would compile for it."""
    order = [c.backend.value for c in torch_ops.explain("toy").candidates]
    first, last = order[0], order[-1]
    for us, chosen in ((1.02, first), (1.021, last)):
        torch_ops.load_tuning_table(save({SMALL: {last: 1.0, first: us}}))
        found = torch_ops.explain("toy", torch.ones(2, 3))
        assert (found.chosen, found.source) == (Backend(chosen), "tuned")
        assert found.candidates[0].backend.value == chosen
        with torch_ops.trace() as seen:
            served()
        assert [record.backend.value for record in seen.records] == [chosen]


def test_compiled_code_follows_a_table_that_differs_in_a_tie_alone(
    tmp_path: Path, fresh_dynamo: None
) -> None:
    """It dissolves where `torch` ties, which is declared first, and else calls what is faster."""
    x, path, op = torch.ones(3, 8), tmp_path / "table.json", catalogue()["rms_norm"]
    bucket, other = (buckets.bucket(op, (x[:n], None, 1e-6)) for n in (3, 1))
    compiled = torch.compile(lambda x: torch.ops.torch_ops.rms_norm(x, None, 1e-6), backend="eager")
    for us, chosen in ((1.01, "torch"), (1.5, "inductor"), (1.01, "torch")):
        times = {"inductor": 1.0, "torch": us}
        rows = {"rms_norm": [tuning.Row(bucket, times), tuning.Row(other, {"torch": 1.0})]}
        path.write_text(json.dumps(tuning.written(tuning.device_name(CPU), rows)))
        torch_ops.load_tuning_table(path)
        with torch_ops.trace() as seen:
            compiled(x)
        assert [record.backend.value for record in seen.records] == [chosen]
    torch_ops.clear_tuning_table()


def test_rows_are_alike_where_they_decide_alike() -> None:
    first, alike, other = (
        tuning.Row(SMALL, {"triton": a, "inductor": b, "torch": c})
        for a, b, c in ((1.0, 1.01, 2.0), (3.0, 3.05, 9.0), (1.0, 1.5, 2.0))
    )
    assert first.ties == alike.ties
    assert first.ties != other.ties


def test_what_ties_with_a_kernel_that_cannot_serve_is_no_matter(toy: Toy) -> None:
    row = tuning.Row(SMALL, {"aiter": 0.5, "triton": 1.0, "torch": 1.01, "inductor": 2.0})
    assert row.preferred(["torch", "inductor", "triton"]) == ("torch", "triton", "inductor")
    assert row.preferred(["inductor", "triton"]) == ("triton", "inductor")
    assert tuning.Row(SMALL, {}).preferred(["torch"]) == ()


def test_shipped_tables_hold_for_the_kernels_of_this_version() -> None:
    """Where versions are those of the table: else it is refused, and says why."""
    paths = sorted(tuning.SHIPPED.glob("*.json"))
    assert [path.name for path in paths] == ["nvidia-h200.json"]
    for path in paths:
        table = tuning.read(path)
        assert table.registry == tuning.fingerprint(table.rows), "measure anew: torch-ops tune"
        assert all(row.us for rows in table.rows.values() for row in rows.values())


def test_explain_shows_the_row_and_the_times(save: Save, served: Toy) -> None:
    path = save({SMALL: {"triton": 2.5, "torch": 9.25}})
    data = json.loads(path.read_text())
    data["rows"]["toy"][SMALL]["rejected"] = {"inductor": "wrong: 2 of its bound"}
    path.write_text(json.dumps(data))
    torch_ops.load_tuning_table(path)
    found = torch_ops.explain("toy", torch.ones(2, 3))
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert lines[1].startswith("-> triton usable ")
    assert lines[1].endswith(" 2.5 us")
    assert lines[2].endswith(" 9.25 us")
    assert lines[3].endswith(" left out: wrong: 2 of its bound")
    assert lines[4] == f"table: {path}, row {SMALL}"
    assert found.row is not None
    assert found.row.us == {"triton": 2.5, "torch": 9.25}
    other = torch_ops.explain("toy", torch.ones(900, 3))
    assert (other.row, other.source) == (None, "declared")
    assert other.table == f"{path}, without a row x float32[1024, 3], n 1: the declared order holds"
    assert torch_ops.explain("toy").table.endswith("whose rows go by the call's arguments")
    torch_ops.clear_tuning_table()
    assert "table" not in str(torch_ops.explain("toy", torch.ones(2, 3)))


REFUSED = [
    ({"device": "NVIDIA H200"}, r"device 'NVIDIA H200' \(here: "),
    ({"versions": {"torch": "1.0"}}, rf"torch 1.0 \(here: {torch.__version__}".replace("+", r"\+")),
    ({"registry": "0123"}, r"registry fingerprint 0123 \(here, of the same ops: [0-9a-f]{16}\)"),
    ({"format": 2}, r"its format is 2 \(accepted: 1\)"),
    ({"rows": {"toy": {SMALL: {"us": {"torch": -1}}}}}, r"time of torch is -1.0 us"),
    ({"rows": {"toy": {SMALL: {"us": {"torch": 10**400}}}}}, r"malformed: OverflowError: int too"),
    ({"rows": {"toy": {SMALL: {}}}}, r"malformed: KeyError: 'us'"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=lambda value: str(value)[:20])
def test_a_table_of_something_else_is_refused_and_changes_nothing(
    changes: dict[str, Any], why: str, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ops.load_tuning_table(save({SMALL: {"triton": 1.0}}))
    before = policy.generation
    path = save({SMALL: {"inductor": 1.0}}, "other.json", **changes)
    with pytest.raises(TuningTableError, match=why):
        torch_ops.load_tuning_table(path)
    assert (policy.generation, run()) == (before, 3.0)
    torch_ops.clear_tuning_table()
    monkeypatch.setenv("TORCH_OPS_TUNING_TABLE", str(path))
    torch_ops.refresh()
    with pytest.raises(TuningTableError, match=why):
        run()


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "{}", "[" * 100_000], ids=lambda x: str(x)[:4]
)
def test_what_is_no_table(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TuningTableError, match=r"tuning table .*table.json' is refused: it "):
        torch_ops.load_tuning_table(path)


def test_a_kernel_that_is_registered_later_ends_a_table(save: Save, served: Toy) -> None:
    torch_ops.load_tuning_table(save({SMALL: {"triton": 1.0}}))
    assert run() == 3.0
    spec = served.serve("flashinfer", 4.0)  # in the order of another platform
    assert run() == 1.0
    assert "not used: table.json is of registry" in str(torch_ops.explain("toy", torch.ones(2, 3)))
    torch_ops.registry.unregister(spec)
    assert run() == 3.0


def test_the_environment_names_a_table_and_a_loaded_one_stands_in_for_it(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_OPS_TUNING_TABLE", str(save({SMALL: {"inductor": 1.0}})))
    assert run() == 1.0  # read at the first resolution and by refresh
    torch_ops.refresh()
    assert run() == 2.0
    torch_ops.load_tuning_table(save({SMALL: {"triton": 1.0}}, "other.json"))
    assert run() == 3.0
    torch_ops.clear_tuning_table()
    assert run() == 2.0


def test_the_shipped_table_of_a_device(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by the device's name; where it doesn't fit, explain says why."""
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "tables")
    (tmp_path / "tables").mkdir()
    name = f"tables/{tuning.slug(tuning.device_name(CPU))}.json"
    save({SMALL: {"triton": 1.0}}, name)
    policy.invalidate()
    assert run() == 3.0
    save({SMALL: {"triton": 1.0}}, name, versions={**tuning.versions(), "torch": "2.0.0"})
    policy.invalidate()
    assert run() == 1.0
    found = torch_ops.explain("toy", torch.ones(2, 3))
    assert found.table.endswith(f".json is of torch 2.0.0 (here: {torch.__version__})")
    assert found.table.startswith("not used: ")
    save({SMALL: {"triton": 1.0}}, name)
    monkeypatch.setenv("TORCH_OPS_TUNING_TABLE", "none")
    torch_ops.refresh()
    assert (run(), torch_ops.explain("toy", torch.ones(2, 3)).table) == (1.0, "")
    assert tuning.slug("NVIDIA H200") == "nvidia-h200"


def test_every_shipped_table_can_be_read_and_lies_under_its_device() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        assert path.stem == tuning.slug(tuning.read(path).device)


def test_compiled_graphs_follow_a_table(save: Save, fresh_dynamo: None) -> None:
    """One graph for each distinct table, none on the way back; the bucket decides in each."""
    first = save({SMALL: {"triton": 1.0}, LARGE: {"inductor": 1.0}})
    slower = save({SMALL: {"triton": 4.0}, LARGE: {"inductor": 9.0}}, "slower.json")
    other = save({SMALL: {"inductor": 1.0}}, "other.json")
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.torch_ops.toy(x) * 1
        return result

    def values() -> list[float]:
        return [float(compiled(torch.ones(n, 3))[0, 0]) for n in (2, 7, 2, 5)]

    steps: list[tuple[Path | None, list[float], int]] = [
        (None, [1.0] * 4, 1),
        (first, [3.0, 2.0, 3.0, 2.0], 2),
        (slower, [3.0, 2.0, 3.0, 2.0], 2),  # decides alike
        (other, [2.0, 1.0, 2.0, 1.0], 3),
        (None, [1.0] * 4, 3),
        (first, [3.0, 2.0, 3.0, 2.0], 3),
    ]
    for path, expected, graphs in steps:
        if path is None:
            torch_ops.clear_tuning_table()
        else:
            torch_ops.load_tuning_table(path)
        assert values() == expected
        assert counter.frame_count == graphs
    with torch_ops.use_backend("inductor"):
        assert values() == [2.0] * 4
    assert values() == [3.0, 2.0, 3.0, 2.0]


def test_inductors_code_asks_by_bucket(save: Save, fresh_dynamo: None) -> None:
    torch_ops.load_tuning_table(save({SMALL: {"triton": 1.0}, LARGE: {"inductor": 1.0}}))
    compiled = torch.compile(lambda x: torch.ops.torch_ops.toy(x) + 0, dynamic=True)
    sizes = (2, 7, 16, 2, 7, 16, 2)  # again, once the kernels have run
    assert [float(compiled(torch.ones(n, 3))[0, 0]) for n in sizes] == [3, 2, 1, 3, 2, 1, 3]


def test_fingerprints_of_caches_differ_by_table(save: Save) -> None:
    seen = [runtime.fingerprint()]
    for times in ({"triton": 1.0}, {"inductor": 1.0}):
        torch_ops.load_tuning_table(save({SMALL: times}))
        seen.append(runtime.fingerprint())
    assert len(set(seen)) == 3
    torch_ops.clear_tuning_table()
    assert runtime.fingerprint() == seen[0]


def test_a_table_is_not_loaded_in_traced_code(save: Save, fresh_dynamo: None) -> None:
    path = save({SMALL: {"triton": 1.0}})

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        torch_ops.load_tuning_table(path)
        return x * 1

    with pytest.raises(Exception, match="load_tuning_table"):
        compiled(torch.ones(2))


def test_another_process_finds_the_same_row(tmp_path: Path, python: Python) -> None:
    """With an op of the catalogue: the bucket and the fingerprint are alike in every process."""
    args = (torch.ones(3, 8), torch.ones(8), 1e-6)
    bucket = buckets.bucket(catalogue()["rms_norm"], args)
    rows = {"rms_norm": [tuning.Row(bucket, {"inductor": 1.0, "torch": 2.0})]}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.written(tuning.device_name(CPU), rows)))
    script = """
        import torch, torch_ops
        found = torch_ops.explain("rms_norm", torch.ones(4, 8), torch.ones(8))
        print(found.chosen.value, found.source)
    """
    assert python(script, TORCH_OPS_TUNING_TABLE=str(path)) == "inductor tuned\n"
    assert python(script) == "torch declared\n"


BUCKETS = [
    ("rms_norm", (torch.empty(3, 5, 64), None, 1e-5), "x float32[16, 64], weight None"),
    ("rms_norm", (torch.empty(64), torch.empty(64)), "x float32[1, 64], weight float32[1, 64]"),
    (
        "apply_rope",
        (torch.empty(5, 6, 64), torch.empty(5, 2, 64), torch.empty(99, 32), torch.arange(5)),
        "q float32[8, 6, 64], k float32[8, 2, 64], cos_sin_cache float32[*, 32], "
        "positions int64[8], is_neox True",
    ),
    (
        "paged_decode",
        (
            torch.empty(16, 8, 64),
            torch.empty(70, 16, 2, 64),
            torch.empty(70, 16, 2, 64),
            torch.empty(17, dtype=torch.int32),
            torch.empty(60, dtype=torch.int32),
            torch.empty(16, dtype=torch.int32),
            0.125,
            127,
            30.0,
        ),
        "q float32[16, 8, 64], k_cache float32[*, 16, 2, 64], v_cache float32[*, 16, 2, 64], "
        "kv_indptr int32[16 + 1], kv_indices int32[64], kv_last_page_len int32[16], "
        "window_left 127, logits_soft_cap on",
    ),
]


@pytest.mark.parametrize(("op", "args", "expected"), BUCKETS, ids=[b[0] for b in BUCKETS])
def test_buckets(op: str, args: tuple[Any, ...], expected: str) -> None:
    assert buckets.bucket(catalogue()[op], args) == expected


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert [buckets.rounded(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [0, 1, 2, 4, 4, 8, 2048]


def test_tables_are_errors_of_this_library() -> None:
    assert issubclass(TuningTableError, TorchOpsError)
