"""Ledgers and receipts as the commands write them: each file holds a single run."""

from __future__ import annotations

from chronik.cli.errors import CliError
from chronik.client.ledger import Ledger


def open_ledger(path: str, flag: str) -> Ledger:
    try:
        return Ledger(path, append=False)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}; choose another {flag}") from None
