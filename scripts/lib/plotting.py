# SPDX-License-Identifier: Apache-2.0
"""Shared by scripts/plot-control and scripts/plot-transport: matplotlib, and the rows of ropeteam-bench."""

from __future__ import annotations

import json
import os
import pathlib
import sys

PROGRAM = pathlib.Path(sys.argv[0]).name


def import_pyplot():
    """Imports matplotlib. If this Python lacks it, the process restarts as the project's own Python."""
    try:
        import matplotlib
    except ImportError:
        own = pathlib.Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
        if own.exists() and os.environ.get("ROPETEAM_PLOT_IN_VENV") != "1":
            os.environ["ROPETEAM_PLOT_IN_VENV"] = "1"
            os.execv(own, [str(own), *sys.argv])
        sys.exit(f"{PROGRAM}: matplotlib is missing: pip install matplotlib, or run scripts/test once")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def read_rows(path: str) -> list[dict]:
    """The rows of one file, in order. Any other line ends the program, with an error that names the line."""
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({"name": row["name"], "median": row["median"], "min": row["min"], "max": row["max"],
                         "baseline": row["baseline_median"]})
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{PROGRAM}: {path}:{number}: not a row of ropeteam-bench ({error})")
    return rows


def draw_line(axis, points: list[tuple[int, dict]], label: str) -> None:
    """Draws the rows' medians over x, with minima and maxima."""
    points = sorted(points, key=lambda point: point[0])
    medians = [row["median"] for _, row in points]
    spread = [[row["median"] - row["min"] for _, row in points], [row["max"] - row["median"] for _, row in points]]
    axis.errorbar([x for x, _ in points], medians, yerr=spread, marker="o", capsize=2, label=label)
