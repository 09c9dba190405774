"""Options that several commands share, and their parsers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer
from typer.main import get_command

from chronik.cli.errors import CliError
from chronik.client.cluster import Cluster
from chronik.client.controller_watch import run_watched
from chronik.client.properties import ClientSettings, Target, load_settings

_T = TypeVar("_T")

DEFAULT_BOOTSTRAP = ClientSettings("127.0.0.1:9092")
PROPERTIES_VARIABLE = "CHRONIK_PROPERTIES"
CLIENT_ID = "chronik-cli"
EPOCH_MS_FROM = 10**12

_PROPERTIES = "chronik.properties"


def _settings(context: typer.Context, given: ClientSettings) -> ClientSettings:
    """Return the settings of the file in --properties, with the addresses of -b if that is given."""
    path = context.meta.get(_PROPERTIES)
    if path is None:
        return given
    source = context.get_parameter_source("bootstrap")
    return load_settings(path, given.bootstrap if source is not None and source.name == "COMMANDLINE" else None)


Bootstrap = Annotated[
    ClientSettings,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT[,...]",
        help="One or more brokers of the cluster.",
        parser=ClientSettings.of,
        callback=_settings,
    ),
]
"""Where the cluster is, and how to connect to it. `add_properties` adds --properties to commands that have this."""
Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Acks = Annotated[str, typer.Option("--acks", metavar="all|1|0", help="Which acknowledgement a record waits for.")]


def add_properties(command: Any) -> None:
    """Add --properties to a command, and to its subcommands, if it connects to a cluster."""
    for child in getattr(command, "commands", {}).values():
        add_properties(child)
    if any(parameter.name == "bootstrap" for parameter in command.params):
        command.params += [option for option in _with_properties().params if option.name == "properties"]


def _with_properties() -> Any:
    """Return a command that has the option: only Typer can build its options."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def holder(
        properties: Annotated[
            str | None,
            typer.Option(
                "--properties",
                metavar="FILE",
                envvar=PROPERTIES_VARIABLE,
                help="Client settings in Kafka's names: bootstrap.servers, security.protocol, ...",
                is_eager=True,
                expose_value=False,
                callback=_remember_properties,
            ),
        ] = None,
    ) -> None: ...

    return get_command(app)


def _remember_properties(context: typer.Context, path: str | None) -> str | None:
    if path:
        context.meta[_PROPERTIES] = path
    return path


def parse_acks(text: str) -> str:
    acks = {"all": "all", "-1": "all", "1": "1", "0": "0"}.get(text.lower())
    if acks is None:
        raise CliError(f"--acks {text} is unknown: use all, 1 or 0")
    return acks


def parse_configs(flag: str, texts: Sequence[str] | None, example: str) -> dict[str, str]:
    """Parse the values of a flag that may be repeated, each NAME=VALUE."""
    configs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise CliError(f"{flag} {text} is not NAME=VALUE: write it as in {example}")
        configs[name.strip()] = value.strip()
    return configs


def parse_time_ms(text: str) -> int | None:
    """Parse ISO 8601 (local time if no zone is given) or milliseconds since 1970; return None for anything else."""
    if text.isascii() and text.isdigit():
        return int(text) if int(text) >= EPOCH_MS_FROM else None
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return None


def parse_time_option(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    time_ms = parse_time_ms(text)
    if time_ms is None:
        raise CliError(f"{flag} {text} is not a time: write 2026-01-31T12:00:00Z, or milliseconds since 1970")
    return time_ms


def with_cluster(target: Target, work: Callable[[Cluster], Awaitable[_T]], timeout_s: float = 30.0) -> _T:
    """Run `work` on a new event loop with a cluster client, and close the client afterwards."""
    settings = ClientSettings.of(target)

    async def run() -> _T:
        async with Cluster(
            settings.endpoints, client_id=CLIENT_ID, timeout_s=timeout_s, security=settings.security
        ) as cluster:
            return await work(cluster)

    return asyncio.run(run())


def with_controller(target: Target, work: Callable[[Cluster], Coroutine[Any, Any, _T]]) -> _T:
    """As `with_cluster`, for work that cannot succeed without a controller: raise NoController if there is none."""
    settings = ClientSettings.of(target)
    endpoints, security = settings.endpoints, settings.security
    return with_cluster(settings, lambda cluster: run_watched(work(cluster), endpoints, CLIENT_ID, security))
