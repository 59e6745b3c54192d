"""Read and write JSONL files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: Mapping[str, Any]) -> str:
    """Write these rows as JSONL; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
