# SPDX-License-Identifier: Apache-2.0
"""Any plain Python state as tensors and one JSON value, and back.

    tensors, skeleton = flatten(scheduler.state_dict())
    ...                                   # both are saved: no tensor's bytes were copied
    scheduler.load_state_dict(unflatten(skeleton, tensors))

The skeleton is strict JSON (no NaN, no integer beyond 64 bits), so any reader can read it. Values that JSON
has are unchanged: None, bool, int, finite float, str, list, dict with str keys. Every other value is an
object whose key "$" gives its kind:

    {"$": "tensor", "name": N}                       the tensor N; also "parameter", "requires_grad"
    {"$": "dict", "items": [[key, value], …]}        a dict with other keys; "OrderedDict", "Counter", and
                                                     "defaultdict" with its "factory" likewise
    {"$": "tuple", "items": […]}                     "set", "frozenset", "Size", "range", "slice", and "deque"
                                                     with its "maxlen" likewise
    {"$": "int", "hex": "0x…"}                       an integer beyond 64 bits
    {"$": "float", "value": "nan"}                   or "inf", "-inf"
    {"$": "complex", "value": "(1+2j)"}
    {"$": "bytes", "base64": "…"}                    or "tensor": N, of uint8, when they are many; "bytearray"
    {"$": "ndarray", "dtype": D, "shape": S, "data": {"$": "bytes", …}}        numpy's, in C order
    {"$": "scalar", "dtype": D, "data": …}           a numpy scalar
    {"$": "numpy.dtype", "dtype": D}
    {"$": "numpy.random", "kind": K, "state": …}     RandomState, or a Generator over the bit generator K
    {"$": "random", "state": …}                      random.Random
    {"$": "torch.dtype", "value": "bfloat16"}        "torch.device", "torch.layout", "torch.memory_format"
                                                     likewise
    {"$": "torch.Generator", "device": …, "state": tensor}
    {"$": "pickle", "data": …}                       all else: torch.save's bytes, which torch.load takes with
                                                     weights_only=True; that is tried when it is saved

Loading cannot run code. A type that neither list contains raises TypeError before anything is saved.
"""

from __future__ import annotations

import base64
import ctypes
import io
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .._errors import Corrupt, NotFound, RopeteamError, Unsupported
from .._values import JsonValue
from ._pt import load_pt

_TAG = "$"
#: Values with at least this many bytes become a separate tensor, which is not encoded.
_INLINE_BYTES = 256
#: Names of tensors are shorter, so that a caller's prefix fits before them (ROPETEAM_NAME_MAX is 255).
_NAME_BYTES_MAX = 160
_DEPTH_MAX = 100

_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size"}
_MAKE_SEQUENCE: dict[str, Callable[[Iterable[Any]], Any]] = {name: kind for kind, name in _SEQUENCES.items()}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    defaultdict: "defaultdict",
}
_PLAIN_TYPES = (dict, list, set, tuple, int, float, str, bool, bytes, Counter, OrderedDict)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in _PLAIN_TYPES}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TORCH_NAMED: dict[type, str] = {
    torch.dtype: "torch.dtype",
    torch.memory_format: "torch.memory_format",
    torch.layout: "torch.layout",
}
#: numpy.random's bit generators.
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], JsonValue]:
    """The tensors of a state, by their paths, and everything else as JSON.

    Tensors are the live ones, not copies; if possible, a numpy array becomes a tensor over its own memory.
    One tensor in several places (same memory, dtype and shape) is one entry, and is one tensor again after
    unflatten(). Lists and mappings in several places become equal ones.

    TypeError, with the place and the type: the value can be saved neither in this format nor by a pickle that
    loads weights-only, or is nested deeper than 100 levels (for example because it contains itself).
    """
    flattener = _Flattener()
    skeleton = flattener.encode(state, (), 0)
    return flattener.tensors, skeleton


def unflatten(skeleton: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of flatten(). The result shares the tensors of `tensors`.

    NotFound: a tensor is missing. Unsupported: the skeleton has an unknown kind of value, a pickle that torch
    does not load here, or numpy's values while numpy is not installed. Corrupt: it is not from flatten().
    """
    try:
        return _Unflattener(tensors).decode(skeleton)
    # RuntimeError: of torch, and a recursion that is too deep.
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        if isinstance(error, RopeteamError):
            raise
        raise Corrupt(f"this is not a state that was flattened: {type(error).__name__}: {error}") from error


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}  # by a key that identifies equal tensors

    def encode(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else {_TAG: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        if depth > _DEPTH_MAX:
            raise TypeError(
                f"{_place(path)} is nested deeper than {_DEPTH_MAX} levels, or contains itself: "
                "it cannot be saved"
            )
        if kind in _MAPPINGS:
            return self._mapping(value, path, depth)
        if kind is list:
            return self._items(value, path, depth)
        if kind in _SEQUENCES:
            if kind in (set, frozenset):
                value = sorted(value, key=repr)  # their own order differs between processes
            return {_TAG: _SEQUENCES[kind], "items": self._items(value, path, depth)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        return self._other(value, path, depth)

    def _items(self, values: Iterable[Any], path: tuple[str, ...], depth: int) -> list[Any]:
        return [self.encode(value, (*path, str(index)), depth + 1) for index, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> Any:
        if type(value) is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(inner, (*path, key), depth + 1) for key, inner in value.items()}
        items = [
            [self.encode(key, (*path, "key"), depth + 1), self.encode(inner, (*path, str(key)), depth + 1)]
            for key, inner in value.items()
        ]
        encoded: dict[str, Any] = {_TAG: _MAPPINGS[type(value)], "items": items}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            if factory is not None and (name is None or _FACTORIES.get(name) is not factory):
                raise TypeError(
                    f"{_place(path)} is a defaultdict whose factory is {factory!r}, which cannot be saved: "
                    "only built-in types can"
                )
            encoded["factory"] = name
        return encoded

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        plain = type(value) in _PLAIN_TENSORS
        if value.layout != torch.strided or value.is_quantized or not (plain or hasattr(value, "to_local")):
            return self._pickle(value, path)
        encoded: dict[str, Any] = {_TAG: "tensor", "name": self._add(value, path)}
        if isinstance(value, torch.nn.Parameter):
            encoded["parameter"] = True
        if value.requires_grad:
            encoded["requires_grad"] = True
        return encoded

    def _add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        """The name of a tensor among `tensors`; the same name for all equal views of one memory."""
        key: Any = id(tensor)  # which stays its own: the tensor is kept
        if type(tensor) in _PLAIN_TENSORS and tensor.numel() and tensor.data_ptr():
            seen = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.data_ptr(), tensor.device, seen)
        if key in self._names:
            return self._names[key]
        wanted = "/".join(path) or "value"
        if len(wanted.encode("utf-8", "surrogateescape")) > _NAME_BYTES_MAX or "\0" in wanted:
            wanted = "long"
        name, number = wanted, 2
        while name in self.tensors:
            name, number = f"{wanted}~{number}", number + 1
        self._names[key] = name
        self.tensors[name] = tensor
        return name

    def _bytes(self, value: Any, path: tuple[str, ...], kind: str = "bytes") -> dict[str, Any]:
        if len(value) < _INLINE_BYTES:
            return {_TAG: kind, "base64": base64.b64encode(value).decode()}
        return {_TAG: kind, "tensor": self._add(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _other(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        kind = type(value)
        if kind is bytes or kind is bytearray:
            return self._bytes(value, path, kind.__name__)
        if kind is complex:
            return {_TAG: "complex", "value": repr(value)}
        if kind is deque:
            return {_TAG: "deque", "items": self._items(value, path, depth), "maxlen": value.maxlen}
        if kind is range or kind is slice:
            items = self._items((value.start, value.stop, value.step), path, depth)
            return {_TAG: kind.__name__, "items": items}
        if kind in _TORCH_NAMED:
            return {_TAG: _TORCH_NAMED[kind], "value": str(value).split(".", 1)[-1]}
        if kind is torch.device:
            return {_TAG: "torch.device", "value": str(value)}
        if kind is torch.Generator:
            state = self.encode(value.get_state(), (*path, "state"), depth + 1)
            return {_TAG: "torch.Generator", "device": str(value.device), "state": state}
        if kind is random.Random:
            return {_TAG: "random", "state": self.encode(value.getstate(), path, depth + 1)}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            encoded = self._numpy(numpy, value, path, depth)
            if encoded is not None:
                return encoded
        return self._pickle(value, path)

    def _numpy(self, numpy: Any, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """None: not numpy's, or it contains objects."""
        if isinstance(value, numpy.dtype) and not value.hasobject:
            return {_TAG: "numpy.dtype", "dtype": _dtype_json(numpy, value, path)}
        if isinstance(value, numpy.generic) and not value.dtype.hasobject:
            dtype = _dtype_json(numpy, value.dtype, path)
            return {_TAG: "scalar", "dtype": dtype, "data": self._bytes(value.tobytes(), path)}
        if type(value) is numpy.ndarray and not value.dtype.hasobject:
            dtype = _dtype_json(numpy, value.dtype, path)
            encoded: dict[str, Any] = {_TAG: "ndarray", "dtype": dtype, "shape": list(value.shape)}
            in_place = value.flags.c_contiguous and value.flags.writeable and value.nbytes >= _INLINE_BYTES
            if in_place:
                memory = torch.from_numpy(value.reshape(-1).view(numpy.uint8))
                encoded["data"] = {_TAG: "bytes", "tensor": self._add(memory, path)}
            else:
                encoded["data"] = self._bytes(value.tobytes(), path)
            return encoded
        if type(value) is numpy.random.RandomState:
            state = value.get_state(legacy=False)
        elif type(value) is numpy.random.Generator:
            state = value.bit_generator.state
        else:
            return None
        if state["bit_generator"] not in _BIT_GENERATORS:
            return None
        encoded_state = self.encode(state, (*path, "state"), depth + 1)
        return {_TAG: "numpy.random", "kind": type(value).__name__, "state": encoded_state}

    def _pickle(self, value: Any, path: tuple[str, ...]) -> Any:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            load_pt(buffer.getbuffer())
        except Exception as error:  # pickle and the types' own code may raise anything
            kind, why = type(value), (str(error) or type(error).__name__).splitlines()[0]
            raise TypeError(
                f"{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: only "
                "plain Python values, tensors, numpy's values, and what torch.load() takes with "
                f"weights_only=True can ({why})"
            ) from error
        return {_TAG: "pickle", "data": self._bytes(buffer.getvalue(), path)}


def _place(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the state"


def _dtype_json(numpy: Any, dtype: Any, path: tuple[str, ...]) -> Any:
    """numpy's description of a dtype: a string, or of a structured one a list."""
    described = dtype.str if dtype.fields is None else dtype.descr
    if numpy.dtype(described) != dtype:
        raise TypeError(
            f"{_place(path)} has the dtype {dtype}, which has no plain description: it cannot be saved"
        )
    return described


class _Unflattener:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def decode(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.decode(inner) for inner in value]
        if not isinstance(value, Mapping):
            return value
        if _TAG not in value:
            return {key: self.decode(inner) for key, inner in value.items()}
        tag = value[_TAG]
        if tag in _MAKE_SEQUENCE:
            return _MAKE_SEQUENCE[tag](self._items(value))
        if tag in _MAPPINGS.values():
            return self._mapping(tag, value)
        return self._other(tag, value)

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise NotFound(f"the state needs a tensor {name!r}, which was not saved with it") from None

    def _items(self, value: Mapping[str, Any]) -> list[Any]:
        """The items of a sequence, which are a list: of a long range, a list would take all memory."""
        if not isinstance(value["items"], list):
            raise Corrupt(f"the items of a {value[_TAG]} are not a list")
        return [self.decode(inner) for inner in value["items"]]

    def _mapping(self, tag: str, value: Mapping[str, Any]) -> Any:
        items = [(self.decode(key), self.decode(inner)) for key, inner in value["items"]]
        if tag == "Counter":
            return Counter(dict(items))
        if tag == "OrderedDict":
            return OrderedDict(items)
        if tag == "defaultdict":
            factory = value["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], items)
        return dict(items)

    def _bytes(self, value: Mapping[str, Any]) -> bytes:
        if "base64" in value:
            return base64.b64decode(value["base64"])
        tensor = self._tensor(value["tensor"]).cpu().contiguous()
        return ctypes.string_at(tensor.data_ptr(), tensor.numel())

    def _other(self, tag: str, value: Mapping[str, Any]) -> Any:
        if tag == "tensor":
            return self._as_saved(value)
        if tag == "int":
            return int(value["hex"], 16)
        if tag == "float":
            return float(value["value"])
        if tag == "complex":
            return complex(value["value"])
        if tag in ("bytes", "bytearray"):
            return self._bytes(value) if tag == "bytes" else bytearray(self._bytes(value))
        if tag == "deque":
            return deque(self._items(value), value["maxlen"])
        if tag in ("range", "slice"):
            return (range if tag == "range" else slice)(*self._items(value))
        if tag in _TORCH_NAMED.values():
            made = getattr(torch, value["value"])
            if _TORCH_NAMED.get(type(made)) != tag:
                raise Corrupt(f"{value['value']!r} is not a {tag}")
            return made
        if tag == "torch.device":
            return torch.device(value["value"])
        if tag == "torch.Generator":
            generator = torch.Generator(value["device"])
            generator.set_state(self.decode(value["state"]).cpu())
            return generator
        if tag == "random":
            made_random = random.Random()
            made_random.setstate(self.decode(value["state"]))
            return made_random
        if tag == "pickle":
            return _unpickle(self._bytes(value["data"]))
        if tag in ("ndarray", "scalar", "numpy.dtype", "numpy.random"):
            return self._numpy(tag, value)
        raise Unsupported(f"the state has a value of the kind {tag!r}, which this package does not know")

    def _as_saved(self, value: Mapping[str, Any]) -> torch.Tensor:
        tensor = self._tensor(value["name"])
        grad = bool(value.get("requires_grad"))
        if not value.get("parameter"):
            return tensor.requires_grad_() if grad and not tensor.requires_grad else tensor
        name = value["name"]
        if name not in self._parameters:
            self._parameters[name] = torch.nn.Parameter(tensor.detach(), requires_grad=grad)
        return self._parameters[name]

    def _numpy(self, tag: str, value: Mapping[str, Any]) -> Any:
        try:
            import numpy
        except ImportError as error:
            raise Unsupported("the state has values of numpy's, and numpy is not installed") from error
        if tag == "numpy.random":
            state = self.decode(value["state"])
            check_numpy_position(state)
            if value["kind"] == "RandomState":
                made = numpy.random.RandomState(_bit_generator(numpy, state["bit_generator"]))
                made.set_state(state)
                return made
            bits = _bit_generator(numpy, state["bit_generator"])
            bits.state = state
            return numpy.random.Generator(bits)
        described = value["dtype"]
        dtype = numpy.dtype(described if isinstance(described, str) else _dtype_list(described))
        if tag == "numpy.dtype":
            return dtype
        if dtype.hasobject:
            raise Corrupt(f"the dtype {dtype} has objects in it")  # the bytes would be pointers
        data = bytearray(self._bytes(value["data"]))  # writable, as the array was
        shape = (1,) if tag == "scalar" else tuple(value["shape"])
        array = numpy.ndarray(shape, dtype, buffer=data)
        return array[0] if tag == "scalar" else array


def _unpickle(encoded: bytes) -> Any:
    try:
        return load_pt(memoryview(encoded))
    except RopeteamError as error:
        raise Unsupported(
            "torch.load(weights_only=True) took a value when it was saved and does not take it here; a class "
            f"of the program's own is made known by torch.serialization.add_safe_globals(): {error}"
        ) from error


def _bit_generator(numpy: Any, name: str) -> Any:
    if name not in _BIT_GENERATORS:
        raise Corrupt(f"{name!r} is not a bit generator of numpy's")
    return getattr(numpy.random, name)()


def check_numpy_position(state: Mapping[str, Any]) -> None:
    """numpy reads at this place of its buffer without a check of its own. Corrupt: it is outside."""
    kind = state["bit_generator"]
    place, limit = 0, 0  # of a kind without such a place
    if kind == "MT19937":
        place, limit = state["state"]["pos"], 624
    elif kind == "Philox":
        place, limit = state["buffer_pos"], 4
    if type(place) is not int or not 0 <= place <= limit:
        raise Corrupt(f"a random generator {kind} at position {place!r:.100} of its buffer, limit {limit}")


def _dtype_list(described: Any) -> list[tuple[Any, ...]]:
    """JSON has lists where numpy wants tuples: [name, type, shape] of each field."""
    fields = []
    for field in described:
        kind = field[1] if isinstance(field[1], str) else _dtype_list(field[1])
        fields.append((field[0], kind, *(tuple(shape) for shape in field[2:])))
    return fields
