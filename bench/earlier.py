"""The source before the schema registry, for comparisons: the commit that `git archive` writes to a folder."""

from __future__ import annotations

import compileall
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EARLIER = "f55a314"


@contextmanager
def earlier_source() -> Iterator[Path]:
    """Yield its src folder, compiled to bytecode like the checkout. Raises CalledProcessError without the commit."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER, "src"], stdout=subprocess.PIPE, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="chronik-earlier-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder, "src")
        compileall.compile_dir(source, quiet=1)
        yield source
