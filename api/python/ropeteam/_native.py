# SPDX-License-Identifier: Apache-2.0
"""libropeteam.so through ctypes: how it is found, its types, and handles that close once, after their last
use.

ctypes.CDLL releases the interpreter lock around every call, so other threads of the training process run
during a save or a wait. ropeteam_last_error() is per thread, and a Python thread is one thread of the system.
So it is safe to call it right after the failed call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import threading
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Callable

from ._errors import Code, InvalidArgument, RopeteamError, Unsupported, error_for

RANK_FROM_ENV = 0xFFFFFFFF
TIMEOUT_MAX_MS = 86_400_000


class OpenOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("socket", c_char_p),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("incarnation_token", c_char_p),
        ("timeout_ms", c_int64),
    ]


class InfoStruct(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("incarnation", c_uint64),
        ("chunk_bytes", c_uint64),
        ("arena_bytes", c_uint64),
    ]


class SaveOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bytes", c_uint64), ("objects", c_uint64), ("agreement", c_uint64)]


class Part(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("length", c_uint64), ("stream", c_void_p), ("flags", c_uint64)]


class NamedPart(ctypes.Structure):
    _fields_ = [("name", c_void_p), ("part", Part)]


PART_BACKGROUND = 1


class PolicyStruct(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("persist_every", c_uint64), ("keep_on_storage", c_uint32)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("step", c_uint64),
        ("incarnation", c_uint64),
        ("world_size", c_uint32),
        ("passed_over", c_uint32),
        ("passed_over_step", c_uint64),
    ]


class ObjectStruct(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("length", c_uint64)]


class ViewOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("partial", c_uint32)]


class RangeStruct(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("offset", c_uint64),
        ("length", c_uint64),
        ("count", c_uint64),
        ("stride", c_uint64),
        ("data", c_void_p),
        ("data_stride", c_uint64),
    ]


class StorageStepStruct(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("step", c_uint64),
        ("incarnation", c_uint64),
        ("folder", c_char_p),
        ("problem", c_char_p),
        ("metadata", c_char_p),
        ("time_s", c_uint64),
        ("bytes", c_uint64),
        ("world_size", c_uint32),
    ]


# name: (result, arguments), in the order of ropeteam.h.
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ropeteam_version": (c_char_p, []),
    "ropeteam_status_name": (c_char_p, [c_int]),
    "ropeteam_last_error": (c_char_p, []),
    "ropeteam_open": (c_int, [ctypes.POINTER(OpenOptions), ctypes.POINTER(c_void_p)]),
    "ropeteam_close": (None, [c_void_p]),
    "ropeteam_info": (c_int, [c_void_p, ctypes.POINTER(InfoStruct)]),
    "ropeteam_save_begin": (
        c_int,
        [c_void_p, c_uint64, ctypes.POINTER(SaveOptions), ctypes.POINTER(c_void_p)],
    ),
    "ropeteam_save_put": (c_int, [c_void_p, c_char_p, c_void_p, c_uint64]),
    "ropeteam_save_put_cuda": (c_int, [c_void_p, c_char_p, c_void_p, c_uint64, c_void_p]),
    "ropeteam_save_put_parts": (c_int, [c_void_p, c_char_p, ctypes.POINTER(Part), c_uint64]),
    "ropeteam_save_put_many": (c_int, [c_void_p, ctypes.POINTER(NamedPart), c_uint64]),
    "ropeteam_save_append": (c_int, [c_void_p, c_void_p, c_uint64]),
    "ropeteam_save_reserve": (c_int, [c_void_p, c_char_p, c_uint64, ctypes.POINTER(c_void_p)]),
    "ropeteam_save_commit": (c_int, [c_void_p]),
    "ropeteam_save_abort": (c_int, [c_void_p]),
    "ropeteam_save_close": (None, [c_void_p]),
    "ropeteam_wait": (c_int, [c_void_p, c_uint64, c_int, c_int64]),
    "ropeteam_drop": (c_int, [c_void_p, c_uint64, c_int64]),
    "ropeteam_persist": (c_int, [c_void_p, c_uint64, c_int64]),
    "ropeteam_set_policy": (c_int, [c_void_p, ctypes.POINTER(PolicyStruct), c_int64]),
    "ropeteam_latest": (c_int, [c_void_p, ctypes.POINTER(StepStruct), c_int64]),
    "ropeteam_latest_at": (c_int, [c_void_p, c_int, ctypes.POINTER(StepStruct), c_int64]),
    "ropeteam_view_open": (c_int, [c_void_p, c_uint64, c_uint32, c_int64, ctypes.POINTER(c_void_p)]),
    "ropeteam_view_open_with": (
        c_int,
        [c_void_p, c_uint64, c_uint32, ctypes.POINTER(ViewOptions), c_int64, ctypes.POINTER(c_void_p)],
    ),
    "ropeteam_view_count": (c_uint64, [c_void_p]),
    "ropeteam_view_origin": (c_int, [c_void_p]),
    "ropeteam_view_object": (c_int, [c_void_p, c_uint64, ctypes.POINTER(ObjectStruct)]),
    "ropeteam_view_find": (c_int, [c_void_p, c_char_p, ctypes.POINTER(ObjectStruct)]),
    "ropeteam_view_read": (c_int, [c_void_p, c_char_p, c_uint64, c_void_p, c_uint64, c_int64]),
    "ropeteam_view_read_cuda": (
        c_int,
        [c_void_p, c_char_p, c_uint64, c_void_p, c_uint64, c_void_p, c_int64],
    ),
    "ropeteam_view_read_ranges": (c_int, [c_void_p, ctypes.POINTER(RangeStruct), c_uint64, c_int64]),
    "ropeteam_view_map": (
        c_int,
        [c_void_p, c_char_p, ctypes.POINTER(c_void_p), ctypes.POINTER(c_uint64), c_int64],
    ),
    "ropeteam_view_close": (None, [c_void_p]),
    "ropeteam_storage_list": (c_int, [c_void_p, c_uint32, c_int64, ctypes.POINTER(c_void_p)]),
    "ropeteam_storage_list_count": (c_uint64, [c_void_p]),
    "ropeteam_storage_list_step": (c_int, [c_void_p, c_uint64, ctypes.POINTER(StorageStepStruct)]),
    "ropeteam_storage_list_close": (None, [c_void_p]),
}


def _candidates() -> list[str]:
    """The paths of the library, in order; only the first that exists is loaded."""
    found: list[str] = []
    package = pathlib.Path(__file__).resolve().parent
    wheel = package / "lib" / "libropeteam.so"
    if wheel.exists():
        found.append(str(wheel))
    # As `cmake --install` lays it out: the package is in lib/ropeteam/python, the library in lib.
    installed = package.parents[2] / "libropeteam.so"
    if package.parts[-3:-1] == ("ropeteam", "python") and installed.exists():
        found.append(str(installed))
    # In a source tree: the build directories, release first. The header shows that the tree is Ropeteam's.
    root = package.parents[2]
    if (root / "api" / "include" / "ropeteam" / "ropeteam.h").exists():
        release = root / "build" / "release" / "api" / "client" / "libropeteam.so"
        others = sorted(root.glob("build/*/api/client/libropeteam.so"))
        found += [str(path) for path in [release, *others] if path.exists()]
    system = ctypes.util.find_library("ropeteam")
    if system is not None:
        found.append(system)
    return found


class Library:
    """The loaded library with typed functions, e.g. ``library.wait`` for ropeteam_wait."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise Unsupported(f"cannot load libropeteam.so from {path}: {error}") from error
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(self._dll, name)
            except AttributeError as error:
                raise Unsupported(f"{path} has no {name}: it is not a libropeteam.so of this API") from error
            function.restype = result
            function.argtypes = arguments
            setattr(self, name[len("ropeteam_") :], function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only called for names that __init__ did not set. It tells type checkers that all others are
        # functions.
        raise AttributeError(name)

    def check(self, status: int) -> None:
        """Raises the exception of `status`, with the library's text, unless it is OK."""
        if status == Code.OK:
            return
        message = self.last_error().decode("utf-8", "replace")
        if not message:
            message = self.status_name(status).decode("utf-8", "replace")
        raise error_for(status, message)


_lock = threading.Lock()
_loaded: Library | None = None


def library() -> Library:
    """The only library of this process, loaded at the first call.

    If ROPETEAM_LIBRARY is set, only that path is tried. Otherwise these are tried: the package (of a wheel),
    the installation that contains the package, the build tree of a source checkout (release first), then the
    search path of the system's loader.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            pinned = os.environ.get("ROPETEAM_LIBRARY")
            candidates = [pinned] if pinned else _candidates()
            if not candidates:
                raise Unsupported(
                    "libropeteam.so not found: install the package from a wheel, set ROPETEAM_LIBRARY to the "
                    "library's path, or install it where ldconfig finds it"
                )
            _loaded = Library(candidates[0])
        return _loaded


class Handle:
    """A C handle that is closed when the last reference to this object goes.

    A call holds a reference while it runs, a mapped memoryview holds its view's, and a view holds its
    client's. So closing in one thread never frees memory that another uses, and arena pages stay as long as
    Python can reach them. After fork() the handle belongs to the parent: the child may not use it and does
    not close it.
    """

    def __init__(self, pointer: int, close: Callable[[int], None], owner: Handle | None = None) -> None:
        self._pointer = pointer
        self._close = close
        self._owner = owner
        # Stored here: at the interpreter's end the module may be destroyed before this object.
        self._getpid = os.getpid
        self._pid = os.getpid()

    @property
    def own(self) -> bool:
        """Whether this process opened it, and not a parent of this process."""
        return self._getpid() == self._pid

    @property
    def pointer(self) -> int:
        if not self.own:
            raise InvalidArgument("this handle was opened before fork(): a child process must open its own")
        return self._pointer

    def __del__(self) -> None:
        if self.own:
            self._close(self._pointer)


def timeout_ms(seconds: float) -> int:
    """Seconds as the C API's milliseconds. Rounded up, so that a small timeout does not become 0, which does
    not wait."""
    if not seconds >= 0:
        raise InvalidArgument(f"timeout {seconds} s: at least 0 is needed")
    return int(min(-(-seconds * 1000 // 1), TIMEOUT_MAX_MS)) if seconds < 1e9 else TIMEOUT_MAX_MS


def unsigned(value: int, bits: int, what: str) -> int:
    """Checks a number that ctypes would silently truncate."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{what} {value!r}: an integer from 0 to {(1 << bits) - 1} is needed")
    return value


def encode_name(name: str) -> bytes:
    """An object's name as bytes. A zero byte inside would end it early in C; the library checks the other
    rules."""
    if not isinstance(name, str):
        raise InvalidArgument(f"name {name!r}: a str is needed")
    encoded = name.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        raise InvalidArgument(f"name {name!r}: holds a zero byte")
    return encoded


def decode_name(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


__all__ = ["Handle", "Library", "RopeteamError", "library"]
