# SPDX-License-Identifier: Apache-2.0
"""What a restore tells the program's user, in one line."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

_log = logging.getLogger("ropeteam")

#: The origins of a view, from the nearest to the farthest.
_PLACES = {"memory": "its node's memory", "peers": "the memory of other nodes", "storage": "storage"}


def farthest(origins: Iterable[str]) -> str:
    """Where a rank had to go for its state; "" if the daemon does not say."""
    order = list(_PLACES)
    return max((each for each in origins if each in _PLACES), key=order.index, default="")


def text(step: int, origins: Sequence[str], size: int, seconds: float) -> str:
    """origins: farthest() of each rank."""
    counts = Counter(_PLACES[each] for each in origins if each)
    places = [
        place if len(origins) == 1 else f"{place} ({n} of {len(origins)} ranks)"
        for place, n in counts.items()
    ]
    where = f" from {', '.join(places)}" if places else ""
    much = f"{size / 2**20:.1f} MiB in {seconds:.2f} s"
    return f"step {step} is restored{where}: {much}; the next step is {step + 1}"


def say(line: str) -> None:
    """To the log "ropeteam", level info; to stderr if the program has no logging."""
    if _log.hasHandlers():
        _log.info("%s", line)
    else:
        print(f"ropeteam: {line}", file=sys.stderr, flush=True)
