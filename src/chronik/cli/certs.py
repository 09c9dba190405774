"""`chronik certs`: certificates for development."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from chronik.cli.errors import CliError
from chronik.local.certificates import (
    AUTHORITY_NAME,
    CERTIFICATE_DAYS,
    Authority,
    create_authority,
    load_authority,
)

app = typer.Typer(no_args_is_help=True, help="Create certificates for development.")

DAYS_MAX = 3650
NODE = "node"


@app.callback()
def certs() -> None:
    """Create certificates for development."""


@app.command()
def create(
    folder: Annotated[str, typer.Option("--dir", metavar="DIR", help="Where the files are written.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A host name or IP address of the nodes; repeatable."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="A client's certificate too; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=DAYS_MAX)] = CERTIFICATE_DAYS,
) -> None:
    """Create an authority, or use that of DIR, and issue certificates for nodes (--host) and clients (--client)."""
    hosts, clients = list(dict.fromkeys(host or ())), list(dict.fromkeys(client or ()))
    if not hosts and not clients:
        raise CliError("name the nodes' hosts with --host, or clients with --client")
    if NODE in clients:
        raise CliError(f"--client {NODE} would replace the certificate of the nodes: choose another name")
    authority = _authority(folder)
    print(f"authority    {authority.certificate_path}")
    if hosts:
        certificate, key = authority.issue(folder, NODE, hosts, days=days)
        print(f"nodes        {certificate}, {key} ({', '.join(hosts)})")
    for name in clients:
        certificate, key = authority.issue(folder, name, [], days=days)
        print(f"client       {certificate}, {key}")
    print("node.toml    [tls] certificate, key and authorities; clients: ssl.ca.location")


def _authority(folder: str) -> Authority:
    if os.path.exists(os.path.join(folder, f"{AUTHORITY_NAME}.key")):
        return load_authority(folder)
    try:
        return create_authority(folder)
    except OSError as error:
        raise CliError(f"cannot write to {folder}: {error.strerror}; choose another --dir") from None
