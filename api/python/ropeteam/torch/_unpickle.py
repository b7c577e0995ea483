# SPDX-License-Identifier: Apache-2.0
"""Reads the pickles in checkpoints, which whoever wrote the checkpoint could have filled with anything.

A pickle is a program: it names functions and calls them. Here it may use only the objects of a fixed table.
Nothing is imported by a name from a file, and no attribute is looked up by one. The weights_only=True of
torch.load has a table, too, but adds all that any library of the process has registered. Megatron-Core
registers numpy's dtype. With the state of a dtype a file can declare its bytes to be pointers to objects.
"""

from __future__ import annotations

import _compat_pickle
import contextlib
import enum
import functools
import importlib
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import _weights_only_unpickler as by_torch

from .._errors import Unsupported

_REGISTER = "torch.serialization.add_safe_globals() allows a class that you trust"

#: The opcodes of pickle's protocols 2 to 5 for plain values, and those that the methods below check.
_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "EMPTY_DICT EMPTY_SET BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET BINPERSID GLOBAL STACK_GLOBAL REDUCE "
    "NEWOBJ BUILD APPEND APPENDS SETITEM SETITEMS"
).split()
_Python: Any = pickle._Unpickler  # type: ignore[attr-defined, unused-ignore]


class Unpickler(_Python):  # type: ignore[misc]
    """Python's unpickler in Python, which can check each step. A subclass sets `table`.

    Unsupported: the pickle needs what is not in the table. Any other exception: it is damaged."""

    table: Mapping[str, Any] = {}
    trust = _REGISTER  # the end of an error's text

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._ids = frozenset(map(id, self.table.values()))
        self._classes = {each for each in self.table.values() if isinstance(each, type)}

    def find_class(self, module: str, name: str) -> Any:
        full = _name(module, name)
        if full not in self.table:
            raise Unsupported(
                f"the checkpoint has a {full}, which is not in the list of what may be loaded; {self.trust}"
            )
        return self.table[full]

    def _refuse(self, text: str) -> None:
        raise Unsupported(f"the checkpoint would {text}, which is not allowed; {self.trust}")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if id(function) not in self._ids:
            self._refuse(f"call a {type(function).__name__}")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack[-1]
        if cls not in self._classes:
            self._refuse(f"make an object of a {type(cls).__name__}")
        self.stack[-1] = cls.__new__(cls, *arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        kind = type(built)
        if kind in _numpy_setters():
            _numpy_setters()[kind](built, state)
        elif kind is torch.Tensor:
            built.set_(*state)
        elif kind is OrderedDict:
            built.__dict__.update(self._attributes(state))
        elif kind not in self._classes or isinstance(built, enum.Enum):  # members are shared
            self._refuse(f"set the state of a {kind.__name__}")
        elif hasattr(built, "__setstate__"):
            built.__setstate__(state)
        else:
            slots: Any = None
            if isinstance(state, tuple) and len(state) == 2:
                state, slots = state
            built.__dict__.update(self._attributes(state or {}))
            for key, value in self._attributes(slots or {}).items():
                setattr(built, key, value)

    def _attributes(self, state: Any) -> dict[str, Any]:
        """An object's own __reduce_ex__ would be called when the object is pickled again."""
        for name in state:
            if name.startswith("__"):
                self._refuse(f"set {name}")
        return dict(state)

    def _only(self, target: Any, kinds: tuple[type, ...]) -> None:
        if type(target) not in kinds:
            self._refuse(f"add items to a {type(target).__name__}")

    def load_append(self) -> None:
        self._only(self.stack[-2], (list,))
        super().load_append()

    def load_appends(self) -> None:
        self._only(self.metastack[-1][-1], (list,))
        super().load_appends()

    def load_setitem(self) -> None:
        self._only(self.stack[-3], (dict, OrderedDict, Counter))
        super().load_setitem()

    def load_setitems(self) -> None:
        self._only(self.metastack[-1][-1], (dict, OrderedDict, Counter))
        super().load_setitems()


def _dispatch() -> dict[int, Callable[[Any], None]]:
    opcodes = [getattr(pickle, each)[0] for each in _OPCODES]
    return {each: getattr(Unpickler, _Python.dispatch[each].__name__) for each in opcodes}


Unpickler.dispatch = _dispatch()


def _name(module: str, name: str) -> str:
    """Protocol 2 has Python 2's names."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def loads(pickled: bytes, table: Mapping[str, Any], trust: str) -> Any:
    """pickle.loads() with this table."""
    unpickler = type("Unpickler", (Unpickler,), {"table": table, "trust": trust})
    return unpickler(io.BytesIO(pickled)).load()


# ---- tables


def weights(classes: Iterable[str] = ()) -> dict[str, Any]:
    """The table for torch.save's files: what torch.load accepts with weights_only=True, numpy's plain arrays
    and scalars, and these classes."""
    return {**_registered(), **_torch(), **_numpy(), **_present(tuple(classes))}


def refused(names: Iterable[str], classes: Iterable[str]) -> list[str]:
    """Those of a pickle's names, as written in it, that weights(classes) does not have."""
    table = weights(classes)
    return sorted(each for each in names if _name(*each.rsplit(".", 1)) not in table)


@functools.lru_cache(maxsize=None)
def _present(classes: tuple[str, ...]) -> dict[str, Any]:
    """Those of the classes that are installed. The names are constants of this package."""
    found = {}
    for each in classes:
        module, _, name = each.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):
            found[each] = getattr(importlib.import_module(module), name)
    return found


def _registered() -> dict[str, Any]:
    """What the program and its libraries have registered by add_safe_globals()."""
    found: dict[str, Any] = by_torch._get_user_allowed_globals()
    blocked = by_torch._blocklisted_modules
    return {name: each for name, each in found.items() if name.partition(".")[0] not in blocked}


@functools.lru_cache(maxsize=None)
def _torch() -> dict[str, Any]:
    """torch's own list, without the classes of torch 0.x, e.g. torch.sparse.FloatTensor."""
    old = set(torch._tensor_classes)
    table = {
        name: each
        for name, each in by_torch._get_allowed_globals().items()
        if not (isinstance(each, type) and each in old)
    }
    table["builtins.bytes"] = _no_bytes
    return {**table, "_codecs.encode": _encode, "torch._tensor._rebuild_from_type_v2": _from_type}


def _no_bytes() -> bytes:
    """How protocol 2 has b""."""
    return b""


def _encode(text: str, encoding: str = "") -> bytes:
    """How protocol 2 has bytes. codecs would look for a module of the encoding's name."""
    if encoding != "latin1":
        raise Unsupported(f"the checkpoint has a text in the encoding {encoding!r}, which is not latin1")
    return text.encode("latin1")


def _from_type(function: Any, new_type: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """torch's calls any function."""
    if function not in by_torch._tensor_rebuild_functions():
        raise Unsupported(f"the checkpoint would make a tensor by {function}, which is not allowed")
    if not (isinstance(new_type, type) and issubclass(new_type, torch.Tensor)):
        raise Unsupported(f"the checkpoint would make a tensor of type {new_type}, which is not allowed")
    return torch._tensor._rebuild_from_type_v2(function, new_type, arguments, state)


# ---- numpy


class _Array:
    """Stands for numpy.ndarray in a pickle: the class itself makes arrays from any bytes."""


@functools.lru_cache(maxsize=None)
def _numpy() -> dict[str, Any]:
    with contextlib.suppress(ImportError):
        import numpy

        def dtype(code: Any, align: Any = False, copy: Any = True) -> Any:
            made = numpy.dtype(code if isinstance(code, str) else "O", copy=True)
            if made.kind not in "biufcSU":
                raise Unsupported(f"the checkpoint has {code!r} in numpy: only numbers and texts are loaded")
            return made

        def reconstruct(array: Any, shape: Any, code: Any) -> Any:
            if array is not _Array or shape != (0,):
                raise Unsupported(f"the checkpoint has an array of class {array}, which is not loaded")
            return numpy.empty(0, "b")

        def scalar(kind: Any, data: Any) -> Any:
            if not isinstance(kind, numpy.dtype) or not isinstance(data, bytes) or len(data) != kind.itemsize:
                raise ValueError("not a scalar of numpy")
            return numpy.frombuffer(data, kind)[0]

        table: dict[str, Any] = {"numpy.dtype": dtype, "numpy.ndarray": _Array}
        for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
            table.update({f"{core}._reconstruct": reconstruct, f"{core}.scalar": scalar})
        return table
    return {}


@functools.lru_cache(maxsize=None)
def _numpy_setters() -> dict[type, Callable[[Any, Any], None]]:
    """What BUILD does for numpy's objects, by their exact class."""
    if not _numpy():
        return {}
    import numpy

    def dtype(made: Any, state: Any) -> None:
        """Only the order of its bytes may differ from a new one."""
        plain = made.__reduce__()[2]
        if type(state) is not tuple or state[:1] + state[2:] != plain[:1] + plain[2:]:
            raise Unsupported(f"the checkpoint would change the dtype {made}: only plain dtypes are loaded")
        if type(state[1]) is not str or state[1] not in "<>=|":
            raise ValueError(f"{state[1]!r} is not a byte order")
        made.__setstate__((plain[0], state[1], *plain[2:]))

    def array(made: Any, state: Any) -> None:
        _, _, kind, _, data = state
        if not isinstance(kind, numpy.dtype) or not isinstance(data, bytes):
            raise ValueError("not the state of a plain array")
        made.__setstate__(state)

    kinds: set[type] = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    return {numpy.ndarray: array, **dict.fromkeys(kinds, dtype)}
