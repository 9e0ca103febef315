"""The commands of ``torch-ops``. Each gathers a report; `output` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from torch_ops.cli import arguments, output

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What torch_ops would run, why, and whether it is right.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Op = Annotated[str, typer.Argument(help="Name of an op; 'torch-ops list' lists them.")]
Device = Annotated[str, typer.Option(help="Where the tensors are: cpu, cuda, cuda:1.")]


@app.command()
def info(as_json: Json = False) -> None:
    """Show the platforms, the backends with their states, and the versions."""
    from torch_ops.cli import inventory

    output.present(inventory.info, as_json)


@app.command("list")
def list_ops(as_json: Json = False) -> None:
    """List the ops with their schemas and the backends that serve them."""
    from torch_ops.cli import inventory

    output.present(inventory.ops, as_json)


@app.command()
def explain(
    op: Annotated[
        str | None, typer.Argument(help="Name of an op; 'torch-ops list' lists them.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Of a tensor argument, as in 4x4096; once per tensor, in their order."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of all tensors, or one per --shape.", show_default="float32"),
    ] = None,
    device: Device = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="Ask for this backend, as a call would.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument that is no tensor, as in eps=1e-5."),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Compile this function without arguments instead, and run it: what is fused.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which backend a call would run, where that comes from, and why not the others.

    Without --shape only the device counts. Runs nothing, but for --graph.
    """
    from torch_ops.cli import explanation

    with usage_errors():
        if (op is None) == (graph is None):
            raise arguments.UsageError("name an op, or a function by --graph, and not both")
        if graph is not None:
            function = arguments.parse_function(graph)
            output.present(lambda: explanation.graph(function), as_json)
            return
        assert op is not None
        sample = arguments.Sample(
            shapes=[arguments.parse_shape(text) for text in shape or ()],
            dtypes=[arguments.parse_dtype(text) for text in dtype or ("float32",)],
            device=arguments.parse_device(device),
            values=dict(arguments.parse_value(text) for text in arg or ()),
        )
        output.present(lambda: explanation.report(op, sample, backend), as_json)


@app.command()
def verify(
    backend: Annotated[str, typer.Option(help="Whose kernels.")],
    op: Annotated[str | None, typer.Argument(help="Default: every op that it serves.")] = None,
    device: Device = "cpu",
    profile: Annotated[
        str, typer.Option(help="How long to search: dev, torch_ops_ci, nightly or soak.")
    ] = "torch_ops_ci",
    isolate: Annotated[
        bool | None,
        typer.Option(
            "--isolate/--no-isolate",
            help="Whether kernels run in a process of their own, which may crash or hang.",
            show_default="isolated on a GPU",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove a backend's kernels; exits with 1 where one is wrong or not proven."""
    from torch_ops.cli import proof

    with usage_errors():
        place = arguments.parse_device(device)
        output.present(lambda: proof.report(op, backend, place, profile, isolate), as_json)


@app.command()
def tune(
    op: Annotated[list[str] | None, typer.Argument(help="Default: every op.")] = None,
    shapes: Annotated[
        str, typer.Option(help="A model, as llama3-8b, or a JSON file of sizes by op.")
    ] = "llama3-8b",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of the inputs.", show_default="bfloat16 on a GPU, else float32"),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the table there, beside rows that it has.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cuda if there is one")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time all kernels that are right, for each bucket of calls; a table for later choices."""
    from torch_ops.cli import tuning

    with usage_errors():
        place = arguments.parse_device(device or arguments.best_device())
        names = [str(arguments.parse_dtype(text)).removeprefix("torch.") for text in dtype or ()]
        output.present(lambda: tuning.report(op or (), shapes, names, place, save), as_json)


@app.command()
def matrix(
    markdown: Annotated[bool, typer.Option("--markdown", help="The page SUPPORT.md.")] = False,
    evidence: Annotated[
        Path | None, typer.Option(help="Results of benchmarks with proofs of a GPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which kernel may run where, for which dtype, and what shows that it is right."""
    from torch_ops.cli import matrix as command

    output.present(lambda: command.report(evidence, markdown), as_json)


@app.command()
def demo(
    question: Annotated[
        str | None, typer.Argument(help="What to ask.", show_default="the capital of France")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let a real model answer, compiled, with its attention swapped half way through."""
    from torch_ops.cli import demonstration

    output.present(lambda: demonstration.report(question), as_json)


@app.command()
def serve_demo(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 32,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cuda if there is one")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve many requests in one batch, swap its attention meanwhile, and cancel one."""
    from torch_ops.cli import demonstration

    with usage_errors():
        place = arguments.parse_device(device or arguments.best_device())
        output.present(lambda: demonstration.serving(requests, place), as_json)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a `UsageError` into the message and the exit code of a wrong command line."""
    try:
        yield
    except arguments.UsageError as error:
        raise typer.BadParameter(str(error)) from None
