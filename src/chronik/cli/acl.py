"""`chronik acl`: who may do what on topics, groups, the cluster and transactional ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import (
    CLUSTER_NAME,
    EVERY_PRINCIPAL,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, with_controller
from chronik.cli.output import print_json, print_table
from chronik.client.acls import Acls
from chronik.client.cluster import Cluster

app = typer.Typer(no_args_is_help=True, help="Add, list and remove ACLs: who may do what.")

PRINCIPAL_HELP = f"For example User:alice; {EVERY_PRINCIPAL} is every principal."
OPERATIONS = tuple(each for each in Operation if each not in (Operation.UNKNOWN, Operation.ANY))
OPERATION_HELP = f"Repeatable: {', '.join(each.name for each in OPERATIONS[:9])}, ..."

Principal = Annotated[str, typer.Option("--principal", metavar="P", help=PRINCIPAL_HELP)]
Operations = Annotated[list[str], typer.Option("--operation", metavar="O", help=OPERATION_HELP)]
OnTopic = Annotated[str | None, typer.Option("--topic", metavar="T", help="A topic; * is every topic.")]
OnGroup = Annotated[str | None, typer.Option("--group", metavar="G", help="A group; * is every group.")]
OnCluster = Annotated[bool, typer.Option("--cluster", help="The cluster itself.")]
OnTransactionalId = Annotated[str | None, typer.Option("--transactional-id", metavar="ID")]
Prefixed = Annotated[bool, typer.Option("--prefixed", help="The name is a prefix.")]
PrincipalFilter = Annotated[str | None, typer.Option("--principal", metavar="P", help=PRINCIPAL_HELP)]
OperationFilter = Annotated[str | None, typer.Option("--operation", metavar="O")]
HostFilter = Annotated[str | None, typer.Option("--host", metavar="H")]
Deny = Annotated[bool, typer.Option("--deny", help="Deny, which takes precedence over allow.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@app.command()
def add(
    principal: Principal,
    operation: Operations,
    topic: OnTopic = None,
    group: OnGroup = None,
    cluster: OnCluster = False,
    transactional_id: OnTransactionalId = None,
    prefixed: Prefixed = False,
    deny: Deny = False,
    host: Annotated[
        str, typer.Option("--host", metavar="H", help="An address, or in Chronik a CIDR range.")
    ] = WILDCARD,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Allow a principal to carry out operations on a resource, or deny it."""
    resource_type, name = _required_resource(topic, group, cluster, transactional_id)
    bindings = [
        AclBinding(
            resource_type,
            name,
            PatternType.PREFIXED if prefixed else PatternType.LITERAL,
            _principal(principal),
            host,
            _operation(each),
            Permission.DENY if deny else Permission.ALLOW,
        )
        for each in operation
    ]

    async def work(online: Cluster) -> None:
        await Acls(online).create(bindings)

    with_controller(bootstrap, work)
    if as_json:
        print_json({"acls": [_described(binding) for binding in bindings]})
    else:
        for binding in bindings:
            say(f"added: {_sentence(binding)}")


@app.command("list")
def list_acls(
    principal: PrincipalFilter = None,
    operation: OperationFilter = None,
    topic: OnTopic = None,
    group: OnGroup = None,
    cluster: OnCluster = False,
    transactional_id: OnTransactionalId = None,
    prefixed: Prefixed = False,
    deny: Annotated[bool, typer.Option("--deny", help="Only those that deny.")] = False,
    host: HostFilter = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List ACLs: all, or those that match."""
    resource = _resource(topic, group, cluster, transactional_id)
    selection = _selection(principal, operation, resource, prefixed, deny, host)
    acls = with_controller(bootstrap, lambda online: Acls(online).list(selection))
    if as_json:
        print_json({"acls": [_described(binding) for binding in acls]})
    else:
        _print(acls)


@app.command()
def remove(
    principal: PrincipalFilter = None,
    operation: OperationFilter = None,
    topic: OnTopic = None,
    group: OnGroup = None,
    cluster: OnCluster = False,
    transactional_id: OnTransactionalId = None,
    prefixed: Prefixed = False,
    deny: Annotated[bool, typer.Option("--deny", help="An ACL that denies.")] = False,
    host: HostFilter = None,
    yes: Yes = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Remove all ACLs that match. Ask first, unless one ACL is named exactly or --yes is given."""
    resource = _resource(topic, group, cluster, transactional_id)
    selection = _selection(principal, operation, resource, prefixed, deny, host)
    if None not in (principal, operation, resource):
        # The defaults of `add`: what it added, the same words remove.
        permission = Permission.DENY if deny else Permission.ALLOW
        selection = msgspec.structs.replace(selection, host=host or WILDCARD, permission=permission)
    if selection == AclFilter():
        raise CliError("name what to remove: --principal, --operation, --topic, ...; chronik acl list shows all")
    if not (yes or selection.is_exact):
        matching = with_controller(bootstrap, lambda online: Acls(online).list(selection))
        _confirm(matching)
    removed = with_controller(bootstrap, lambda online: Acls(online).delete(selection))
    if not removed:
        raise CliError("no ACL matches: see chronik acl list")
    if as_json:
        print_json({"acls": [_described(binding) for binding in removed]})
    else:
        for binding in removed:
            say(f"removed: {_sentence(binding)}")


def _confirm(matching: Sequence[AclBinding]) -> None:
    if not matching:
        raise CliError("no ACL matches: see chronik acl list")
    if not sys.stdin.isatty():
        raise CliError(f"{len(matching)} ACLs match: pass --yes to remove them, or name one exactly")
    _print(matching)
    if not typer.confirm(f"Remove {len(matching)} ACLs?", err=True):
        raise typer.Abort


def _selection(
    principal: str | None,
    operation: str | None,
    resource: tuple[ResourceType, str] | None,
    prefixed: bool,
    deny: bool,
    host: str | None,
) -> AclFilter:
    if prefixed and resource is None:
        raise CliError("--prefixed needs --topic, --group or --transactional-id")
    pattern = PatternType.ANY if resource is None else PatternType.PREFIXED if prefixed else PatternType.LITERAL
    return AclFilter(
        ResourceType.ANY if resource is None else resource[0],
        None if resource is None else resource[1],
        pattern,
        None if principal is None else _principal(principal),
        host,
        Operation.ANY if operation is None else _operation(operation),
        Permission.DENY if deny else Permission.ANY,
    )


def _required_resource(*given: Any) -> tuple[ResourceType, str]:
    resource = _resource(*given)
    if resource is None:
        raise CliError("name the resource: --topic T, --group G, --cluster or --transactional-id ID")
    return resource


def _resource(
    topic: str | None, group: str | None, cluster: bool, transactional_id: str | None
) -> tuple[ResourceType, str] | None:
    named = [
        (ResourceType.TOPIC, topic),
        (ResourceType.GROUP, group),
        (ResourceType.CLUSTER, CLUSTER_NAME if cluster else None),
        (ResourceType.TRANSACTIONAL_ID, transactional_id),
    ]
    chosen = [(kind, name) for kind, name in named if name is not None]
    if len(chosen) > 1:
        raise CliError("name one resource: --topic, --group, --cluster or --transactional-id")
    if any(not name for _, name in chosen):
        raise CliError("the name of a resource cannot be empty: * is every resource")
    return chosen[0] if chosen else None


def _principal(text: str) -> str:
    kind, colon, name = text.partition(":")
    if not colon or not kind or not name:
        raise CliError(f"--principal {text} is not TYPE:NAME: write it as in User:alice")
    return text


def _operation(text: str) -> Operation:
    name = text.upper().replace("-", "_")
    operation = Operation.__members__.get(name)
    if operation not in OPERATIONS:
        raise CliError(f"--operation {text} is unknown: use {', '.join(each.name for each in OPERATIONS)}")
    return operation


def _described(binding: AclBinding) -> dict[str, str]:
    return {
        "principal": binding.principal,
        "permission": binding.permission.name,
        "operation": binding.operation.name,
        "resource_type": binding.resource_type.name,
        "name": binding.name,
        "pattern": binding.pattern_type.name,
        "host": binding.host,
    }


def _print(acls: Sequence[AclBinding]) -> None:
    columns = ("principal", "permission", "operation", "resource_type", "name", "pattern", "host")
    rows = [[_described(binding)[column] for column in columns] for binding in acls]
    print_table("", tuple(column.replace("_", " ") for column in columns), rows, ())


def _sentence(binding: AclBinding) -> str:
    prefix = "names that begin with " if binding.pattern_type == PatternType.PREFIXED else ""
    where = "" if binding.host == WILDCARD else f" from {binding.host}"
    kind = binding.resource_type.name.lower().replace("_", " ")
    name = "" if binding.resource_type == ResourceType.CLUSTER else f" {prefix}{binding.name}"
    verb = "may not" if binding.permission == Permission.DENY else "may"
    return f"{binding.principal} {verb} {binding.operation.name} {kind}{name}{where}"
