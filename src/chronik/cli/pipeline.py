"""`chronik pipeline`: Spark jobs over topics."""

from __future__ import annotations

import typer

from chronik.cli.pipeline_land import land

app = typer.Typer(no_args_is_help=True, help="Spark jobs over topics: land them in tables.")
app.command("land")(land)
