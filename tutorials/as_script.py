"""Notebooks as scripts: texts and tables are printed, plots are saved as files."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import marimo
from matplotlib.figure import Figure

PLOTS = Path("outputs/tutorials")


def run_as_script(app: marimo.App, notebook: str) -> None:
    """Run all cells; print their texts and tables, and save their figures to `PLOTS`."""
    print(f"running {notebook}: a minute or two", flush=True)
    outputs, _names = app.run()
    plots = 0
    for output in outputs:
        if isinstance(output, Figure):
            plots += 1
            PLOTS.mkdir(parents=True, exist_ok=True)
            path = PLOTS / f"{Path(notebook).stem}-{plots}.png"
            output.savefig(path)
            print(f"[plot: {path}]\n")
        elif markdown := getattr(output, "_repr_markdown_", None):
            print(dedent(markdown()).strip(), end="\n\n")
