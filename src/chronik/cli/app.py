"""The tree of commands, and the one place that turns their failures into a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from chronik import __version__
from chronik.cli.errors import CANNOT, CHECK_FAILED, INTERRUPTED, CliError, say
from chronik.client.controller_watch import NoController
from chronik.client.endpoint import EndpointError
from chronik.client.errors import ClientError, LostAtFirstRequest, SecurityError, UnsupportedByBroker
from chronik.client.ledger import LedgerError
from chronik.client.properties import PropertiesError
from chronik.local.errors import LocalClusterError, UncleanStop
from chronik.observe.build import description
from chronik.wire.errors import ErrorCode, KafkaError

TRACEBACK_VARIABLE = "CHRONIK_TRACEBACK"
COMMANDS = (
    "cluster",
    "topic",
    "produce",
    "consume",
    "group",
    "transaction",
    "schema",
    "quota",
    "verify",
    "doctor",
    "user",
    "acl",
    "certs",
    "trace",
    "bench",
    "sql",
    "pipeline",
    "demo",
)
"""Each has a module of its name here: a Typer `app` for commands with subcommands, else a function."""

GRANT = "an administrator grants rights with chronik acl add; connect as another user with --properties"
HINTS = {
    ErrorCode.unknown_topic_or_partition: "see chronik topic list",
    ErrorCode.topic_already_exists: "choose another name, or use chronik topic alter",
    ErrorCode.invalid_topic_exception: "use up to 249 letters, digits, dots, dashes and underscores",
    ErrorCode.group_id_not_found: "see chronik group list",
    ErrorCode.non_empty_group: "stop its consumers first",
    ErrorCode.transactional_id_not_found: "see chronik transaction list",
    ErrorCode.invalid_replication_factor: "use at most as many replicas as there are brokers",
    ErrorCode.invalid_partitions: "a topic can only grow",
    ErrorCode.invalid_config: "see chronik topic describe for the names",
    ErrorCode.request_timed_out: "a majority of the nodes may be down; see chronik cluster status",
    ErrorCode.not_controller: "the cluster has no controller now; see chronik cluster status, and try again",
    ErrorCode.leader_not_available: "the nodes that hold it may be down; see chronik cluster status",
    ErrorCode.topic_authorization_failed: GRANT,
    ErrorCode.group_authorization_failed: GRANT,
    ErrorCode.cluster_authorization_failed: GRANT,
    ErrorCode.transactional_id_authorization_failed: GRANT,
    ErrorCode.security_disabled: "set enabled = true and super_users in [authorization] of each node.toml",
    ErrorCode.not_enough_replicas: "start the nodes that are down; see chronik cluster status",
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = command(arguments[:1])(arguments, standalone_mode=False, prog_name="chronik")
        sys.stdout.flush()
    except CliError as error:
        say(str(error))
        return error.exit_code
    except EndpointError as error:
        say(f"--bootstrap: {error}")
        return CANNOT
    except PropertiesError as error:
        say(f"--properties: {error}")
        return CANNOT
    except KafkaError as error:
        say(explain(error))
        return CANNOT
    except (LedgerError, LocalClusterError) as error:
        say(str(error))
        return CHECK_FAILED if isinstance(error, UncleanStop) else CANNOT
    except (NoController, SecurityError, LostAtFirstRequest, UnsupportedByBroker) as error:
        say(str(error))
        return CANNOT
    except ClientError as error:
        say(f"{error}: is the broker running there? Pass -b HOST:PORT for another")
        return CANNOT
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`); Python's flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            say(f"internal error, please report it: {error!r} ({TRACEBACK_VARIABLE}=1 shows the traceback)")
            return CANNOT
        line = format_message()
        if line:  # empty if the help was shown instead
            context = getattr(error, "ctx", None)
            say(f"{line.rstrip('.')}: see {'chronik' if context is None else context.command_path} --help")
        return CANNOT
    return code if isinstance(code, int) else 0


def command(first: list[str]) -> Callable[..., Any]:
    """Return the command, with the options that all commands have which connect to a cluster."""
    from typer.main import get_command

    built = get_command(build(first))
    if first and first[0] in COMMANDS:
        from chronik.cli.options import add_properties

        add_properties(built)
    return built


def build(first: list[str]) -> typer.Typer:
    """Build the commands; only the one that the first argument names, if any, because loading all is slow."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Kafka-compatible streaming. Every acknowledged record can be read, and audits prove it.",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.command(
        "start",
        help="Run one node in the foreground.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_start)
    app.command("version")(version)
    app.callback()(_options)
    known = (*COMMANDS, "start", "version", "--version")
    for name in COMMANDS:
        if first and first[0] in known and first[0] != name:
            continue
        module = import_module(f"chronik.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _start(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    from chronik.cli import start

    raise typer.Exit(start.main(arguments or []))


def version() -> None:
    """Print the version, and whether it is compiled."""
    print(f"{__version__} ({description()})")


def _print_version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None: ...


def explain(error: KafkaError) -> str:
    """Return a broker's error as one line, with a hint if there is one."""
    code = error.code.name
    reason = f"{error.message} ({code})" if error.message else f"the broker refused: {code}"
    hint = HINTS.get(error.code)
    return f"{reason}: {hint}" if hint else reason
