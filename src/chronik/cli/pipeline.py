"""`chronik pipeline`: Spark jobs over topics."""

from __future__ import annotations

import typer

from chronik.cli.pipeline_audit import audit
from chronik.cli.pipeline_land import land
from chronik.cli.pipeline_traces import traces

app = typer.Typer(
    no_args_is_help=True,
    help="Spark jobs over topics: land them in tables, prove that nothing is missing, say why it stalled.",
)
app.command("land")(land)
app.command("audit")(audit)
app.command("traces")(traces)
