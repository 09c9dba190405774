"""`chronik group`: groups of all types, their lag, and resetting their offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, parse_time_ms, with_controller
from chronik.cli.output import print_json, print_table
from chronik.client.cluster import Cluster
from chronik.client.groups import SHARE, GroupDescription, Groups, Partition, ShareOffset
from chronik.client.node_addresses import http_addresses
from chronik.client.node_http import TIMEOUT_S, Caller, HttpError, caller_of, get_json
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.wire.errors import ErrorCode, KafkaError

app = typer.Typer(no_args_is_help=True, help="List, describe, reset and delete consumer groups and share groups.")

COLUMNS = ("topic", "partition", "committed", "end", "lag", "member")
LED_BY = ("in_flight", "oldest_lock_s", "delivered", "accepted", "released", "rejected", "exhausted")
"""What the leader of a partition reports of a share group, since it serves the group."""
SHARE_COLUMNS = ("topic", "partition", "start", "end", "lag", *LED_BY, "members")

Group = Annotated[str, typer.Argument(metavar="GROUP")]


@app.command("list")
def list_groups(as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """List all groups."""
    groups = with_controller(bootstrap, lambda cluster: Groups(cluster).list())
    if as_json:
        listed = [
            {"group": g.group, "state": g.state, "type": g.protocol_type, "group_type": g.group_type} for g in groups
        ]
        print_json({"groups": listed})
        return
    rows = [(g.group, g.state, g.protocol_type, g.group_type) for g in groups]
    print_table("", ("group", "state", "type", "group type"), rows, ())


@app.command()
def describe(group: Group, as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Show a group's members, and its lag per partition."""
    caller = caller_of(bootstrap.security)
    described = with_controller(bootstrap, lambda cluster: _describe(cluster, group, caller))
    if as_json:
        print_json(described)
        return
    is_share = described["group_type"] == SHARE
    columns = SHARE_COLUMNS if is_share else COLUMNS
    rows = [[_cell(partition[column]) for column in columns] for partition in described["partitions"]]
    kind = "share group" if is_share else "group"
    title = f"{kind} {group}: {described['state']}, {len(described['members'])} members"
    if described["epoch"] is not None:
        title += f", epoch {described['epoch']}, target of epoch {described['assignment_epoch']}"
        title += f" by {described['assignor']}"
    numbers = ("partition", "committed", "start", "end", "lag", *LED_BY)
    print_table(title, columns, rows, numbers)
    for line in _reconciling(described):
        say(line)


@app.command()
def reset(
    group: Group,
    topic: Annotated[str, typer.Option("--topic", help="The topic whose offsets change.")],
    to: Annotated[str, typer.Option("--to", metavar="earliest|latest|OFFSET|TIME", help="TIME: ISO 8601 or epoch ms.")],
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Reset a group's offsets of a topic. The group's consumers must be stopped."""
    moved = with_controller(bootstrap, lambda cluster: _reset(cluster, group, topic, to))
    if as_json:
        partitions = [{"topic": topic, "partition": p, "committed": offset} for p, offset in moved.items()]
        print_json({"group": group, "partitions": partitions})
        return
    print_table(f"group {group}", ("topic", "partition", "committed"), [(topic, *m) for m in moved.items()], ())


@app.command()
def delete(group: Group, as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Delete a group and its offsets. Its consumers must be stopped."""
    with_controller(bootstrap, lambda cluster: Groups(cluster).delete(group))
    if as_json:
        print_json({"group": group, "deleted": True})
    else:
        say(f"deleted group {group}")


def _cell(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _reconciling(described: dict[str, Any]) -> list[str]:
    """Return a line for each member of a consumer group that has not reached its target yet."""
    lines = []
    for member in described["members"]:
        if member["target"] is None:
            continue
        owned = {(each["topic"], each["partition"]) for each in member["partitions"]}
        target = {(each["topic"], each["partition"]) for each in member["target"]}
        waits = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(target - owned))
        if member["epoch"] < described["assignment_epoch"]:
            lines.append(f"member {member['member']} is at epoch {member['epoch']}: it has not revoked what it must")
        elif waits:
            lines.append(f"member {member['member']} waits until other members have revoked {waits}")
    return lines


def _partitions(partitions: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"topic": topic, "partition": partition} for topic, partition in partitions]


async def _describe(cluster: Cluster, group: str, caller: Caller) -> dict[str, Any]:
    groups = Groups(cluster)
    description = await groups.describe(group)
    if description.group_type == SHARE:
        return await _describe_share(cluster, description, caller)
    committed = await groups.committed(group)
    if description.state == "Dead" and not committed:
        raise KafkaError(ErrorCode.group_id_not_found, f"group {group} does not exist")
    owners = {partition: member for member in description.members for partition in member.partitions}
    listed = sorted({*committed, *owners})
    ends = await _ends(cluster, sorted({topic for topic, _ in listed}))
    partitions = []
    for topic, partition in listed:
        offset, end = committed.get((topic, partition)), ends.get((topic, partition))
        owner = owners.get((topic, partition))
        partitions.append(
            {
                "topic": topic,
                "partition": partition,
                "committed": offset,
                "end": end,
                "lag": None if offset is None or end is None else max(0, end - offset),
                "member": owner.member_id if owner else None,
            }
        )
    members = [
        {
            "member": member.member_id,
            "client_id": member.client_id,
            "host": member.client_host,
            "instance": member.instance_id,
            "partitions": _partitions(member.partitions),
            "epoch": member.epoch,
            "target": None if member.target is None else _partitions(member.target),
            "protocol": "classic" if member.uses_classic_protocol else "consumer",
        }
        for member in description.members
    ]
    return {
        "group": group,
        "state": description.state,
        "assignor": description.assignor,
        "group_type": description.group_type,
        "epoch": description.epoch,
        "assignment_epoch": description.assignment_epoch,
        "members": members,
        "partitions": partitions,
    }


async def _led_shares(
    cluster: Cluster, group: str, topics: Iterable[str], caller: Caller
) -> dict[Partition, dict[str, Any]]:
    """Return what the leaders of partitions report of a share group; nothing of a leader that cannot be asked."""
    found: dict[Partition, dict[str, Any]] = {}
    addresses = await http_addresses(cluster, caller)
    for topic in topics:
        paths = [get_json(address, f"/api/topics/{quote(topic)}", TIMEOUT_S, caller) for address in addresses]
        for view in await asyncio.gather(*paths, return_exceptions=True):
            if isinstance(view, HttpError):
                continue
            if isinstance(view, BaseException):
                raise view
            shares = (share for share in view.get("shares", ()) if share["group"] == group)
            found.update({(topic, share["partition"]): share for share in shares})
    return found


async def _describe_share(cluster: Cluster, description: GroupDescription, caller: Caller) -> dict[str, Any]:
    offsets = await Groups(cluster).share_offsets(description.group)
    users: dict[Partition, list[str]] = {}
    for member in description.members:
        for partition in member.partitions:
            users.setdefault(partition, []).append(member.member_id)
    listed = sorted({*offsets, *users})
    topics = sorted({topic for topic, _ in listed})
    ends = await _ends(cluster, topics)
    led = await _led_shares(cluster, description.group, topics, caller)
    unknown = ShareOffset(None, None)
    return {
        "group": description.group,
        "state": description.state,
        "assignor": description.assignor,
        "group_type": description.group_type,
        "epoch": description.epoch,
        "assignment_epoch": description.assignment_epoch,
        "members": [
            {
                "member": member.member_id,
                "client_id": member.client_id,
                "host": member.client_host,
                "instance": None,
                "partitions": _partitions(member.partitions),
                "epoch": member.epoch,
                "target": None,
                "protocol": SHARE,
            }
            for member in description.members
        ],
        "partitions": [
            {
                "topic": topic,
                "partition": index,
                "start": offsets.get((topic, index), unknown).start,
                "end": ends.get((topic, index)),
                "lag": offsets.get((topic, index), unknown).lag,
                "members": users.get((topic, index), []),
                **{name: led.get((topic, index), {}).get(name) for name in LED_BY},
            }
            for topic, index in listed
        ],
    }


async def _ends(cluster: Cluster, topics: list[str]) -> dict[tuple[str, int], int]:
    """Return the high watermarks; a topic that was deleted after its offsets were committed has none."""
    ends: dict[tuple[str, int], int] = {}
    for topic in topics:
        try:
            listed = await Topics(cluster).offsets(topic, LATEST)
        except KafkaError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
            continue
        ends.update({(topic, partition): end.offset for partition, end in listed.items()})
    return ends


async def _reset(cluster: Cluster, group: str, topic: str, to: str) -> Mapping[int, int]:
    groups, topics = Groups(cluster), Topics(cluster)
    description = await groups.describe(group)
    members = description.members
    if members:
        raise CliError(
            f"group {group} is in use by {len(members)} consumer{'s' if len(members) > 1 else ''}: "
            "stop them, then reset its offsets"
        )
    ends = {partition: listed.offset for partition, listed in (await topics.offsets(topic, LATEST)).items()}
    if to == "latest":
        moved = ends
    elif to == "earliest":
        moved = {partition: listed.offset for partition, listed in (await topics.offsets(topic, EARLIEST)).items()}
    elif (time_ms := parse_time_ms(to)) is not None:
        at_time = await topics.offsets(topic, time_ms)
        moved = {
            partition: ends[partition] if listed.offset < 0 else listed.offset for partition, listed in at_time.items()
        }
    elif to.isascii() and to.isdigit():
        starts = await topics.offsets(topic, EARLIEST)
        moved = {partition: min(max(int(to), starts[partition].offset), end) for partition, end in ends.items()}
    else:
        raise CliError(f"--to {to} is unknown: use earliest, latest, an offset, or a time as in 2026-01-31T12:00:00Z")
    if description.group_type == SHARE:
        try:
            await groups.alter_share_offsets(group, topic, moved)
        except KafkaError as error:
            if error.code is ErrorCode.non_empty_group:
                raise CliError(
                    f"a consumer of group {group} has just joined again: stop it, then reset again"
                ) from None
            raise
        return moved
    try:
        await groups.commit(group, {(topic, partition): offset for partition, offset in moved.items()})
    except KafkaError as error:
        if error.code in (ErrorCode.unknown_member_id, ErrorCode.illegal_generation, ErrorCode.rebalance_in_progress):
            raise CliError(f"a consumer of group {group} has just joined again: stop it, then reset again") from None
        raise
    return moved
