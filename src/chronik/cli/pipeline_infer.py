"""`chronik pipeline land --infer`: propose the columns of JSON values once, and keep them in a file for later runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from chronik.cli.errors import CliError, say
from chronik.client.properties import ClientSettings

SUFFIX = ".schema.sql"
NOTES_SHOWN = 20


def inferred_schema(bootstrap: ClientSettings, topics: Sequence[str], to: str, given: str | None) -> str:
    """Return the path of the schema: an existing file, or a new one from a sample. Raises CliError, PipelineError."""
    if len(topics) != 1:
        raise CliError("--infer proposes the columns of one topic: run a command for each topic")
    (topic,) = topics
    if given is None and "://" in to:
        raise CliError(f"--infer keeps the schema in a local file: pass --schema FILE beside --to {to}")
    path = given or os.path.join(to, topic + SUFFIX)
    if os.path.exists(path):
        say(f"the columns of {topic} are those of {path}: remove it to infer them again")
        return path
    return _infer(bootstrap, topic, path)


def _infer(bootstrap: ClientSettings, topic: str, path: str) -> str:
    from chronik.pipeline.land.sample import sample_values
    from chronik.pipeline.land.schema import RECORD_COLUMNS
    from chronik.pipeline.typed.inference import propose

    proposal = propose(sample_values(bootstrap, topic), sorted(RECORD_COLUMNS))
    if not proposal.columns:
        reason = f"{proposal.others:,} values are no JSON objects" if proposal.others else "there are no values yet"
        remedy = "omit --infer, or pass --format if a registry has the schema"
        raise CliError(f"no columns can be inferred for {topic}: {reason}; {remedy}")
    _write(path, proposal.text)
    dead = f"; {proposal.others:,} values of the sample are no JSON objects: dead letters" if proposal.others else ""
    say(f"{proposal.columns} columns of {topic} from {proposal.objects:,} values are in {path}: check them{dead}")
    for text in proposal.notes[:NOTES_SHOWN]:
        say(f"  {text}")
    if len(proposal.notes) > NOTES_SHOWN:
        say(f"  ... and {len(proposal.notes) - NOTES_SHOWN} more notes")
    return path


def _write(path: str, text: str) -> None:
    """Write the file at once or not at all, and never over another one."""
    new = f"{path}.{os.getpid()}.new"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(new, "x", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(new, path)
        finally:
            os.unlink(new)
    except FileExistsError:
        raise CliError(f"{path} has appeared meanwhile: start again") from None
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}; choose another --schema") from None
