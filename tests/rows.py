"""JSONL files of tests: written and read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: Mapping[str, Any]) -> str:
    """A JSONL file of these rows; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
