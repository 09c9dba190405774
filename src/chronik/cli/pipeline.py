"""`chronik pipeline`: the Spark jobs over topics."""

from __future__ import annotations

import typer

from chronik.cli.pipeline_audit import audit
from chronik.cli.pipeline_traces import traces

app = typer.Typer(no_args_is_help=True, help="Spark jobs: prove that nothing is missing, and say why it stalled.")
app.command()(audit)
app.command()(traces)
