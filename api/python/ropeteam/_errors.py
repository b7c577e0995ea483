# SPDX-License-Identifier: Apache-2.0
"""One exception class for each status of the C API. The numbers are those of ropeteam.h and are only ever
added to."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """ropeteam_status_t."""

    OK = 0
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    ALREADY_EXISTS = 3
    NO_SPACE = 4
    DEADLINE_EXCEEDED = 5
    PEER_GONE = 6
    LINK_FAILED = 7
    CORRUPT = 8
    STALE = 9
    UNAVAILABLE = 10
    UNSUPPORTED = 11
    IO = 12
    ABORTED = 13
    INTERNAL = 14


class RopeteamError(Exception):
    """An error of the store. ``code`` is the status; the text has the values and limits.

    A status that this package does not know (of a newer library) is raised as this class, with ``code`` an
    int.
    """

    code: int = Code.INTERNAL

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidArgument(RopeteamError, ValueError):
    """An error of the caller; repeating the call gives the same answer."""

    code = Code.INVALID_ARGUMENT


class NotFound(RopeteamError, LookupError):
    """There is no such step, rank or object now."""

    code = Code.NOT_FOUND


class AlreadyExists(RopeteamError):
    """This rank has already saved this step or this name."""

    code = Code.ALREADY_EXISTS


class NoSpace(RopeteamError):
    """The arena is full: the text has the bytes needed, free and the limit. Older committed steps stay;
    continue training."""

    code = Code.NO_SPACE


class DeadlineExceeded(RopeteamError, TimeoutError):
    """The timeout has passed; the request may or may not still take effect."""

    code = Code.DEADLINE_EXCEEDED


class PeerGone(RopeteamError):
    """Another node is dead, or has been replaced by another instance."""

    code = Code.PEER_GONE


class LinkFailed(RopeteamError):
    """The connection to another node failed; the node itself may be alive."""

    code = Code.LINK_FAILED


class Corrupt(RopeteamError):
    """No source has bytes that match their checksum; the text has every source that was tried."""

    code = Code.CORRUPT


class Stale(RopeteamError):
    """This process belongs to an older incarnation: the job has restarted without it. Stop saving."""

    code = Code.STALE


class Unavailable(RopeteamError):
    """The node's daemon does not answer; the next call tries to connect again."""

    code = Code.UNAVAILABLE


class Unsupported(RopeteamError):
    """Not supported by this build, this machine or this protocol version."""

    code = Code.UNSUPPORTED


class IoError(RopeteamError):
    """The operating system refused; the text has its error."""

    code = Code.IO


class Aborted(RopeteamError):
    """Ended before it took effect: the save was aborted, or its step will never reach the requested level."""

    code = Code.ABORTED


class InternalError(RopeteamError):
    """A bug in Ropeteam itself; the text has the broken rule."""

    code = Code.INTERNAL


_BY_CODE: dict[int, type[RopeteamError]] = {
    int(cls.code): cls
    for cls in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        NoSpace,
        DeadlineExceeded,
        PeerGone,
        LinkFailed,
        Corrupt,
        Stale,
        Unavailable,
        Unsupported,
        IoError,
        Aborted,
        InternalError,
    )
}


def error_for(code: int, message: str) -> RopeteamError:
    """The exception for a status; never for OK."""
    cls = _BY_CODE.get(code)
    return RopeteamError(message, code) if cls is None else cls(message)
