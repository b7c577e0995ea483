# SPDX-License-Identifier: Apache-2.0
"""Prints a measurement's rows as ropeteam-bench does (bench/report.h): a table, or JSON lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence


def row(
    name: str, unit: str, samples: Sequence[float], baseline_name: str = "", baseline: Sequence[float] = ()
) -> dict[str, object]:
    """The ratio is the median of the ratios of the passes, as Ratio() of bench/report.h."""
    ratio = statistics.median(a / b for a, b in zip(samples, baseline)) if baseline else None
    return {
        "name": name,
        "unit": unit,
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "runs": len(samples),
        "baseline_name": baseline_name or None,
        "baseline_median": statistics.median(baseline) if baseline else None,
        "ratio": ratio,
    }


def show(entry: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry), flush=True)
        return
    line = "{name:<38} {unit:<5} {median:>10.3f} {min:>10.3f} {max:>10.3f} {runs:>4}".format(**entry)
    if entry["ratio"] is not None:
        line += "  {baseline_median:>10.3f} {ratio:>6.3f}  {baseline_name}".format(**entry)
    print(line, flush=True)
