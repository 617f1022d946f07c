"""`doll key`: API keys of the admin service."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from services.cli import tables
from services.cli.arguments import AsJson  # noqa: TC001 -- typer reads it when run
from services.cli.system.outside import outside_of

if TYPE_CHECKING:
    from common.api.keys import KeyStore

app = typer.Typer(no_args_is_help=True, help="Create and revoke API keys of the admin service.")

Name = Annotated[str, typer.Argument(help="Name of the key; the name is not secret.")]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    role: Annotated[
        Literal["viewer", "operator"],
        typer.Option(
            help="Role of the key: a viewer can read jobs; an operator can also change them."
        ),
    ],
    note: Annotated[
        str, typer.Option(help="Note for people, such as who holds the key and why.")
    ] = "",
) -> None:
    """Create an API key and print it once; DOLL stores only its hash.

    Standard output has only the key, for scripts.

    Example: [bold]doll key create page --role viewer > page.key[/]
    """
    with closing(_key_store(context)) as key_store:
        key, record = key_store.create(name, role, note)
    typer.echo(key)
    typer.echo(
        f'key "{record.name}", {record.role}: send it as `Authorization: Bearer KEY`. It cannot be'
        f" shown again; `doll key revoke {record.name}` revokes it",
        err=True,
    )


@app.command("list")
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List the names of all API keys, and who created and revoked them; never a key or its hash.

    Example: [bold]doll key list[/]
    """
    import msgspec

    with closing(_key_store(context)) as key_store:
        keys = key_store.read()
    if as_json:
        listed = [msgspec.to_builtins(keys[key]) for key in sorted(keys)]
        for each in listed:
            each["valid"] = bool(each.pop("sha256"))
        typer.echo(json.dumps(listed, indent=2))
        return
    if not keys:
        typer.echo("no keys yet; create one with `doll key create NAME --role viewer`")
        return
    # Names are for copying, so a narrow terminal must not cut them.
    name_width = max(map(len, keys))
    heads = ("role", "created", "by", "revoked", "note")
    table = Table(Column("key", min_width=name_width), *heads, box=None)
    for name, record in sorted(keys.items()):
        done = {each.action: each for each in record.changes}
        by = done["created"].by if "created" in done else ""
        last = None if record.sha256 else done.get("revoked")
        revoked = f"{_time(last.at_s)} by {last.by}" if last else ""
        cells = (name, record.role, _time(record.created_s), by, revoked, record.note)
        table.add_row(*map(escape, cells))
    tables.show(table)


@app.command()
def revoke(context: typer.Context, name: Name) -> None:
    """Revoke an API key for good; admin services refuse it within seconds.

    Example: [bold]doll key revoke page[/]
    """
    with closing(_key_store(context)) as key_store:
        key_store.revoke(name)
    typer.echo(f'key "{name}" is revoked')


def _key_store(context: typer.Context) -> KeyStore:
    from common.api.keys import KeyStore

    return KeyStore(outside_of(context).open_log())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
