# SPDX-License-Identifier: Apache-2.0
"""Saves from inside a training library. They must not stop the library."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .._client import Client, Level
from .._errors import Aborted, AlreadyExists, NoSpace, NotFound, RopeteamError

_log = logging.getLogger("ropeteam")


class Saver:
    """Saves that do not raise: an exception on one rank would leave the others waiting in the library's own
    collectives. A save that failed is a warning in the log "ropeteam", and its step is never committed."""

    def __init__(self, client: Client, timeout: float) -> None:
        self.client = client
        self.failed = 0
        self._timeout = timeout
        self._last: int | None = None

    def save(self, step: int, put: Callable[[], object]) -> bool:
        """put() saves `step`; after a NoSpace it is called again when the previous step is committed."""
        try:
            try:
                put()
            except NoSpace:
                if not self.settle():
                    raise
                put()
            self.saved(step)
        except AlreadyExists:
            _log.warning("step %d is saved already, and stays as it is", step)
        except RopeteamError as error:
            self.warn(step, error)
            return False
        return True

    def saved(self, step: int) -> None:
        self._last = step

    def warn(self, step: int | None, error: Exception) -> None:
        """step: None if it is not known."""
        self.failed += 1
        which = "a step" if step is None else f"step {step}"
        _log.warning("%s is not safe, training goes on: %s", which, error)

    def settle(self, timeout: float | None = None) -> bool:
        """Waits until the last save is committed, or never will be, for `timeout` seconds. False: there is
        none, or it is still running."""
        if self._last is None:
            return False
        try:
            self.client.wait(self._last, Level.COMMITTED, self._timeout if timeout is None else timeout)
        except (Aborted, NotFound):
            return True
        except RopeteamError:
            return False
        return True
