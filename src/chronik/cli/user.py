"""`chronik user`: users with SCRAM credentials."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from chronik.authentication.sasl import SCRAM_SHA_512
from chronik.authentication.scram import ITERATIONS_MAX, ITERATIONS_MIN
from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, with_controller
from chronik.cli.output import print_json, print_table
from chronik.client.cluster import Cluster
from chronik.client.users import MECHANISM_NUMBERS, Users

app = typer.Typer(no_args_is_help=True, help="Create, list and delete users with SCRAM credentials.")

Name = Annotated[str, typer.Argument(metavar="NAME")]
MECHANISMS = "|".join(MECHANISM_NUMBERS)
PASSWORD_BYTES_MAX = 1024


@app.command()
def create(
    name: Name,
    mechanism: Annotated[str, typer.Option("--mechanism", metavar=MECHANISMS)] = SCRAM_SHA_512,
    iterations: Annotated[
        int,
        typer.Option("--iterations", min=ITERATIONS_MIN, max=ITERATIONS_MAX, help="Rounds of the password's hash."),
    ] = ITERATIONS_MIN,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Create a user, or change its password. The password is read from standard input, or requested without echo."""
    chosen = _mechanism(mechanism)
    if not name:
        raise CliError("the name of a user cannot be empty")
    password = _password(name)

    async def work(cluster: Cluster) -> None:
        await Users(cluster).upsert(name, chosen, password, iterations)

    with_controller(bootstrap, work)
    if as_json:
        print_json({"user": name, "mechanism": chosen, "iterations": iterations})
    else:
        say(f"user {name} has a credential for {chosen}; it gets rights with chronik acl add --principal User:{name}")


@app.command("list")
def list_users(as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """List the users that have SCRAM credentials in the cluster."""
    users = with_controller(bootstrap, lambda cluster: Users(cluster).list())
    if as_json:
        print_json(
            {
                "users": [
                    {
                        "user": user.name,
                        "credentials": [
                            {"mechanism": mechanism, "iterations": iterations}
                            for mechanism, iterations in user.iterations.items()
                        ],
                    }
                    for user in users
                ]
            }
        )
        return
    rows = [(user.name, mechanism, rounds) for user in users for mechanism, rounds in user.iterations.items()]
    print_table("", ("user", "mechanism", "iterations"), rows, ("iterations",))


@app.command()
def delete(
    name: Name,
    mechanism: Annotated[
        str | None, typer.Option("--mechanism", metavar=MECHANISMS, help="Only this credential; default: all.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Delete a user's credentials. Its connections end when they authenticate again; its ACLs stay."""
    only = None if mechanism is None else _mechanism(mechanism)

    async def work(cluster: Cluster) -> list[str]:
        users = Users(cluster)
        known = [each for user in await users.list(name) for each in user.iterations if each in MECHANISM_NUMBERS]
        chosen = [each for each in known if only in (None, each)]
        if not chosen:
            has = f", only for {', '.join(known)}" if known else ""
            what = "credential" if only is None else f"credential for {only}"
            raise CliError(f"user {name} has no {what}{has}: see chronik user list")
        await users.delete(name, chosen)
        return chosen

    deleted = with_controller(bootstrap, work)
    if as_json:
        print_json({"user": name, "deleted": deleted})
    else:
        say(f"deleted the credentials of {name} for {', '.join(deleted)}")


def _mechanism(text: str) -> str:
    chosen = text.upper()
    if chosen not in MECHANISM_NUMBERS:
        raise CliError(f"--mechanism {text} is unknown: use {' or '.join(MECHANISM_NUMBERS)}")
    return chosen


def _password(name: str) -> str:
    """Read the password: never from an argument, which the list of processes would show."""
    if sys.stdin.isatty():
        password = getpass.getpass(f"Password of {name}: ")
        if password != getpass.getpass("Again: "):
            raise CliError("the two passwords differ: try again")
    else:
        password = sys.stdin.readline(PASSWORD_BYTES_MAX + 2).rstrip("\r\n")
    if not password:
        raise CliError("the password is empty: pass it on standard input, or run this on a terminal")
    if len(password.encode()) > PASSWORD_BYTES_MAX:
        raise CliError(f"the password is longer than {PASSWORD_BYTES_MAX} bytes")
    return password
