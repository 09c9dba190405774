"""`chronik quota`: limits of clients, by user, client id or address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, with_controller
from chronik.cli.output import print_json, print_table
from chronik.client.cluster import Cluster
from chronik.client.quotas import ListedQuotas, Quotas
from chronik.quotas.entities import Part, QuotaEntity, QuotaKey, make_entity
from chronik.wire.errors import KafkaError

app = typer.Typer(no_args_is_help=True, help="List, set and remove quotas of clients.")

User = Annotated[str | None, typer.Option("--user", metavar="USER")]
UserDefault = Annotated[bool, typer.Option("--user-default", help="Users without a quota of their own.")]
ClientId = Annotated[str | None, typer.Option("--client-id", metavar="ID")]
ClientIdDefault = Annotated[bool, typer.Option("--client-id-default", help="Client ids without a quota of their own.")]
Ip = Annotated[str | None, typer.Option("--ip", metavar="ADDRESS")]
IpDefault = Annotated[bool, typer.Option("--ip-default", help="Addresses without a quota of their own.")]

COLUMNS = {
    QuotaKey.PRODUCER_BYTE_RATE: "produce bytes/s",
    QuotaKey.CONSUMER_BYTE_RATE: "fetch bytes/s",
    QuotaKey.REQUEST_PERCENTAGE: "request %",
    QuotaKey.CONTROLLER_MUTATION_RATE: "mutations/s",
    QuotaKey.CONNECTION_CREATION_RATE: "connections/s",
}
DEFAULT_NAME = "<default>"


@app.command("list")
def list_quotas(
    user: User = None,
    user_default: UserDefault = False,
    client_id: ClientId = None,
    client_id_default: ClientIdDefault = False,
    ip: Ip = None,
    ip_default: IpDefault = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List all quotas, or those of one user, client id or address."""
    parts = _parts(user, user_default, client_id, client_id_default, ip, ip_default)
    part_of = _entity(parts) if parts else None
    listed = with_controller(bootstrap, lambda cluster: Quotas(cluster).list(part_of))
    if as_json:
        print_json({"quotas": [_as_json(quotas.entity, quotas.values) for quotas in listed]})
        return
    rows = [_row(quotas) for quotas in listed]
    print_table("", ("user", "client id", "address", *COLUMNS.values()), rows, tuple(COLUMNS.values()))


@app.command("set")
def set_quotas(
    user: User = None,
    user_default: UserDefault = False,
    client_id: ClientId = None,
    client_id_default: ClientIdDefault = False,
    ip: Ip = None,
    ip_default: IpDefault = False,
    produce_bytes: Annotated[int | None, typer.Option("--produce-bytes", help="Bytes per second, each node.")] = None,
    fetch_bytes: Annotated[int | None, typer.Option("--fetch-bytes", help="Bytes per second, each node.")] = None,
    request_percent: Annotated[
        float | None, typer.Option("--request-percent", help="CPU time of requests in % of one core, each node.")
    ] = None,
    mutations: Annotated[
        float | None, typer.Option("--mutations", help="Partitions created and deleted per second.")
    ] = None,
    connections: Annotated[
        int | None, typer.Option("--connections", help="New connections of an address per second, each node.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Set quotas of a user, a client id, both together, or an address; quotas that are not given stay as they are."""
    entity = _entity(_parts(user, user_default, client_id, client_id_default, ip, ip_default))
    given = {
        QuotaKey.PRODUCER_BYTE_RATE: produce_bytes,
        QuotaKey.CONSUMER_BYTE_RATE: fetch_bytes,
        QuotaKey.REQUEST_PERCENTAGE: request_percent,
        QuotaKey.CONTROLLER_MUTATION_RATE: mutations,
        QuotaKey.CONNECTION_CREATION_RATE: connections,
    }
    changes = {str(key): float(value) for key, value in given.items() if value is not None}
    if not changes:
        raise CliError("no quota was given: add, for example, --produce-bytes 1000000")
    with_controller(bootstrap, lambda cluster: Quotas(cluster).alter(entity, changes))
    if as_json:
        print_json(_as_json(entity, changes))
    else:
        say(f"set quotas of {entity}")


@app.command()
def remove(
    user: User = None,
    user_default: UserDefault = False,
    client_id: ClientId = None,
    client_id_default: ClientIdDefault = False,
    ip: Ip = None,
    ip_default: IpDefault = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Remove all quotas of exactly this user, client id, both together, or address."""
    entity = _entity(_parts(user, user_default, client_id, client_id_default, ip, ip_default))
    removed = with_controller(bootstrap, lambda cluster: _remove(cluster, entity))
    if as_json:
        print_json({**_as_json(entity, {}), "removed": sorted(removed)})
    else:
        say(f"removed {', '.join(sorted(removed))} of {entity}")


async def _remove(cluster: Cluster, entity: QuotaEntity) -> Mapping[str, float]:
    quotas = Quotas(cluster)
    values = next((listed.values for listed in await quotas.list(entity) if _same(listed.entity, entity)), None)
    if not values:
        raise CliError(f"{entity} has no quotas: see chronik quota list")
    await quotas.alter(entity, dict.fromkeys(values))
    return values


def _same(one: QuotaEntity, other: QuotaEntity) -> bool:
    # Another cluster may list the parts in another order.
    return dict(one.parts) == dict(other.parts)


def _parts(
    user: str | None,
    user_default: bool,
    client_id: str | None,
    client_id_default: bool,
    ip: str | None,
    ip_default: bool,
) -> list[Part]:
    parts: list[Part] = []
    for kind, name, is_default in (
        ("user", user, user_default),
        ("client-id", client_id, client_id_default),
        ("ip", ip, ip_default),
    ):
        if name is not None and is_default:
            raise CliError(f"--{kind} and --{kind}-default exclude each other: give one of them")
        if name is not None or is_default:
            parts.append((kind, name))
    return parts


def _entity(parts: list[Part]) -> QuotaEntity:
    if not parts:
        raise CliError("no entity was given: add --user, --client-id, both, or --ip (or --user-default, ...)")
    try:
        return make_entity(parts)
    except KafkaError as error:
        raise CliError(f"{error.message}: see chronik quota set --help") from None


def _as_json(entity: QuotaEntity, values: Mapping[str, float]) -> dict[str, Any]:
    """Null is the default of its type; a type that the entity does not have is absent."""
    return {"entity": dict(entity.parts), "values": dict(values)}


def _row(quotas: ListedQuotas) -> list[str | None]:
    parts = dict(quotas.entity.parts)
    names = [(parts[kind] or DEFAULT_NAME) if kind in parts else None for kind in ("user", "client-id", "ip")]
    values = [quotas.values.get(key) for key in COLUMNS]
    return [*names, *(None if value is None else f"{value:,.15g}" for value in values)]
