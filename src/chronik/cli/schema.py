"""`chronik schema`: subjects of a schema registry, and whether a new schema fits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from chronik.cli.output import print_json, print_table
from chronik.cli.registry import RegistryUrl, registry_client
from chronik.client.properties import ClientSettings
from chronik.client.schema_registry import AVRO, JSON_SCHEMA, PROTOBUF, RegistryClient, RegistryError

app = typer.Typer(no_args_is_help=True, help="List, show, register, check and delete schemas of a schema registry.")

TYPES = {".avsc": AVRO, ".json": JSON_SCHEMA, ".proto": PROTOBUF}
LEVELS = ("NONE", "BACKWARD", "FORWARD", "FULL")
LATEST = "latest"
NOT_FOUND = 404

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="For example orders-value.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The schema: .avsc, .json (JSON Schema) or .proto.")]
Version = Annotated[str, typer.Option("--version", metavar="N|latest")]
Kind = Annotated[str | None, typer.Option("--type", metavar="AVRO|JSON|PROTOBUF", help="Default: by the file's name.")]
References = Annotated[
    list[str] | None,
    typer.Option("--reference", metavar="NAME=SUBJECT:VERSION", help="A schema that this one uses. Repeatable."),
]


class Registry:
    """Requests whose errors are one line for people."""

    def __init__(self, given: str | None, bootstrap: ClientSettings) -> None:
        self._client: RegistryClient = registry_client(given, bootstrap)

    def request(self, method: str, path: str, body: object = None, **query: str | None) -> Any:
        try:
            return self._client.request(method, path, body, **query)
        except RegistryError as error:
            remedy = "; chronik schema list shows all subjects" if error.status == NOT_FOUND else ""
            raise CliError(f"{error}{remedy}") from None


def _subject(subject: str) -> str:
    return f"/subjects/{quote(subject, safe='')}"


@app.command("list")
def list_subjects(
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Include subjects that are deleted, but not permanently.")
    ] = False,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List subjects with their latest versions."""
    flag = "true" if deleted else None
    listed = Registry(registry, bootstrap).request("GET", "/schemas", latestOnly="true", deleted=flag)
    rows = [
        {"subject": each["subject"], "version": each["version"], "id": each["id"], "type": each.get("schemaType", AVRO)}
        for each in listed
    ]
    if as_json:
        print_json({"subjects": rows})
        return
    print_table("", ("subject", "version", "id", "type"), [list(row.values()) for row in rows], ("version", "id"))


@app.command()
def show(
    subject: Annotated[str | None, typer.Argument(metavar="SUBJECT", help="For example orders-value.")] = None,
    version: Version = LATEST,
    schema_id: Annotated[int | None, typer.Option("--id", metavar="ID", help="Instead of a subject.")] = None,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Show a schema by subject, or by id."""
    if (subject is None) == (schema_id is None):
        raise CliError("name a subject, or an id: chronik schema show orders-value, or chronik schema show --id 7")
    client = Registry(registry, bootstrap)
    if subject is None:
        found = {"id": schema_id, **client.request("GET", f"/schemas/ids/{schema_id}")}
        found["subjects"] = client.request("GET", f"/schemas/ids/{schema_id}/versions")
    else:
        found = client.request("GET", f"{_subject(subject)}/versions/{quote(version)}")
        found["versions"] = client.request("GET", f"{_subject(subject)}/versions")
        levels = client.request("GET", f"/config/{quote(subject, safe='')}", defaultToGlobal="true")
        found["compatibility"] = levels["compatibilityLevel"]
    found.setdefault("schemaType", AVRO)
    if as_json:
        print_json(found)
        return
    fields = [(name, value) for name, value in found.items() if name != "schema"]
    print_table("", ("field", "value"), fields, ())
    print(_pretty(found["schema"]))


@app.command()
def register(
    subject: Subject,
    file: File,
    kind: Kind = None,
    reference: References = None,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Register a schema under a subject, and print its id. A schema that is already there keeps its id."""
    body = _body(file, kind, reference)
    answer = Registry(registry, bootstrap).request("POST", f"{_subject(subject)}/versions", body)
    if as_json:
        print_json(answer)
    else:
        print(f"{subject} has this schema with the id {answer['id']}")


@app.command()
def check(
    subject: Subject,
    file: File,
    kind: Kind = None,
    reference: References = None,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Check whether a schema could be registered; exit code 1 if it is not compatible."""
    body, path = _body(file, kind, reference), f"/compatibility{_subject(subject)}/versions"
    answer = Registry(registry, bootstrap).request("POST", path, body, verbose="true")
    if as_json:
        print_json(answer)
    elif answer["is_compatible"]:
        print(f"{file} is compatible with {subject}")
    else:
        say(f"{file} is not compatible with {subject}")
        for reason in answer.get("messages", ()):
            say(f"  {reason}")
    if not answer["is_compatible"]:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def delete(
    subject: Subject,
    version: Annotated[str | None, typer.Option("--version", metavar="N|latest", help="Default: all versions.")] = None,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="Delete for good: records with its id can no longer be decoded.")
    ] = False,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Delete a subject, or one of its versions. Its ids can still be looked up, unless it is deleted permanently."""
    path = _subject(subject) + (f"/versions/{quote(version)}" if version else "")
    answer = Registry(registry, bootstrap).request("DELETE", path, permanent="true" if permanent else None)
    numbers = answer if isinstance(answer, list) else [answer]
    if as_json:
        print_json({"deleted": numbers})
    else:
        print(f"deleted version {', '.join(map(str, numbers))} of {subject}")


@app.command()
def config(
    subject: Annotated[str | None, typer.Argument(metavar="SUBJECT", help="Default: the global level.")] = None,
    level: Annotated[
        str | None, typer.Option("--set", metavar="LEVEL", help=f"{', '.join(LEVELS)}; also with _TRANSITIVE.")
    ] = None,
    registry: RegistryUrl = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Show or set the compatibility level."""
    client = Registry(registry, bootstrap)
    path = "/config" + (f"/{quote(subject, safe='')}" if subject else "")
    if level is not None:
        client.request("PUT", path, {"compatibility": level.upper()})
    answer = client.request("GET", path, defaultToGlobal="true")
    if as_json:
        print_json(answer)
    else:
        print(f"compatibility of {subject or 'all subjects'}: {answer['compatibilityLevel']}")


def _body(file: Path, kind: str | None, references: list[str] | None) -> dict[str, Any]:
    found = kind.upper() if kind else TYPES.get(file.suffix)
    if found not in TYPES.values():
        raise CliError(f"the type of {file} is unknown: pass --type {'|'.join(TYPES.values())}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"cannot read {file}: {error.strerror if isinstance(error, OSError) else 'it is not UTF-8 text'}"
        ) from None
    return {"schema": text, "schemaType": found, "references": [_reference(each) for each in references or ()]}


def _reference(text: str) -> dict[str, Any]:
    name, _, place = text.rpartition("=")
    subject, _, version = place.rpartition(":")
    if not name or not subject or not version.isdecimal():
        raise CliError(f"--reference {text} is not NAME=SUBJECT:VERSION, as in common.avsc=common-value:1")
    return {"name": name, "subject": subject, "version": int(version)}


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text  # Protobuf
