"""`doll model`: lists the kept versions of a model, and exports one of them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 -- typer reads it when run
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from common.config.program import command_of, search_path
from common.errors import UserError
from services.cli import tables
from services.cli.arguments import JobName  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import service_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Collection

_SUFFIXES = (".pt2", ".onnx")

app = typer.Typer(no_args_is_help=True, help="List and export trained models.")


@app.command()
def pull(
    context: typer.Context,
    job: JobName,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, ending with .safetensors.")
    ],
    version: Annotated[
        str,
        typer.Option(
            help="Version to write: a number, newest, or best (the lowest training loss)."
        ),
    ] = "newest",
) -> None:
    """Write a model's weights to a file that `safetensors.torch.load_file` reads.

    `doll model list` lists the versions that are stored and can be written. `best` is the stored
    version with the lowest mean training loss over the last updates before it.

    Example: [bold]doll model pull digits -o digits.safetensors --version best[/]
    """
    if output.suffix != ".safetensors":
        raise UserError(
            f"--output: must end with .safetensors, got {output};"
            " `doll model export` writes .pt2 and .onnx"
        )
    model = service_of(context).model(job, version)
    try:
        output.write_bytes(model.data)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from error
    typer.echo(
        f"{job} version {model.version} (by the leader of epoch {model.epoch}): {output},"
        f" {len(model.data):,} B"
    )


@app.command()
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="File written by `doll model pull`.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, ending with .pt2 or .onnx.")
    ],
) -> None:
    """Export a model as a program that runs without the task's code (`torch.export` or ONNX).

    The program's inputs are the fields that the task's `forward` reads, in the order of the job
    file, for any number of records. The program's metadata describes the model.

    Example: [bold]doll model export digits.safetensors -o digits.onnx[/]
    """
    from common.learning.torch_here import need_torch

    _check_output(output)
    need_torch("doll model export")
    try:
        model = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    _export_apart(model, output, settings_of(context).tasks)
    typer.echo(f"{file}: {output}, {output.stat().st_size:,} B")


@app.command("list")
def list_versions(context: typer.Context, job: JobName) -> None:
    """List the versions of a job's model whose weights are stored, newest first.

    `loss` is the mean training loss of the last updates before the version was stored. For `doll
    model pull`, the version `best` is the one with the lowest loss.

    Example: [bold]doll model list digits[/]
    """
    answer = service_of(context).versions(job)
    names = sorted({name for each in answer.versions for name in each.test})
    table = Table(
        "version", "by", "loss", *(f"test {n}" for n in names), "records", "kept", box=None
    )
    for each in answer.versions:
        loss = "-" if each.loss is None else f"{each.loss:.4f}"
        tests = (f"{each.test[name]:.4f}" if name in each.test else "-" for name in names)
        cells = f"{each.version:,}", str(each.epoch), loss, *tests, f"{each.samples:,}", each.kept
        table.add_row(*cells)
    if answer.versions:
        tables.show(table)
    else:
        typer.echo(f"no version of {job} is stored yet")


def _check_output(path: Path) -> None:
    """Refuse a file that cannot be written here."""
    if path.suffix not in _SUFFIXES:
        raise UserError(f"--output: must end with {' or '.join(_SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: there is no folder {path.parent}")
    if path.suffix == ".onnx" and find_spec("onnxscript") is None:
        raise UserError(
            "the ONNX exporter is not installed; run `pip install 'doll[export]'`, or export .pt2"
        )


def _export_apart(model: bytes, path: Path, allowed: Collection[str]) -> None:
    """Let another process write the file; it may import only the entrypoints of DOLL_TASKS."""
    import subprocess

    command = command_of("common.jobs.export", str(path), *allowed)
    # The other process looks for the task's code in the same folders as this one.
    environment = {**os.environ, "PYTHONPATH": search_path(sys.path)}
    done = subprocess.run(  # noqa: S603 -- our own command line
        command, input=model, capture_output=True, check=False, env=environment
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [
            "the export process failed without a message"
        ]
        raise UserError(words[-1])
