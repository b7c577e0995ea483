# SPDX-License-Identifier: Apache-2.0
"""The values that can be saved, as memory: tensors, buffers and JSON values, and the index object that tells
them apart.

An object is bytes; the library does not interpret them. Python needs more information to return the same
value: a tensor's dtype and shape, and whether a value was JSON. One small JSON object for each shard has it,
named ".ropeteam/index":

    {"version": 2, "world_size": 4,
     "objects": {"w": {"kind": "tensor", "dtype": "bfloat16", "shape": [2, 3]}, "data": {"kind": "json"}}}

Objects that are not in it are plain bytes. So a shard saved from C loads as bytes, and a shard saved here can
be read from C. Nothing is pickled: a checkpoint cannot run code.

If a tensor is part of a larger one, "global" is the shape of the whole, and "runs" says which part it is: for
each dimension the indexes as start, length, start, length, …. An entry with "at": [rank, name] has no object
here: that rank saved the same bytes under that name. "sum" is for bytes that several ranks have, so that they
can be compared. Version 1 had none of the four, and no "world_size".
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from ._errors import Corrupt, InvalidArgument, Unsupported

if TYPE_CHECKING:
    import torch

JsonValue = Union[None, bool, int, float, str, "Sequence[JsonValue]", "Mapping[str, JsonValue]"]
#: A torch.Tensor, an object with the buffer protocol (bytes, memoryview, numpy array, …), or a JSON value.
Value = Union["torch.Tensor", bytes, bytearray, memoryview, JsonValue, Any]

RESERVED_PREFIX = ".ropeteam/"
INDEX_NAME = RESERVED_PREFIX + "index"
INDEX_VERSION = 2  # version 1 is still read
#: The object with a step's metadata; the daemons use it, too.
METADATA_NAME = "ropeteam.metadata"


@dataclass(frozen=True)
class ObjectInfo:
    """The entry of one object in a shard's index."""

    kind: str  # "tensor", "json" or "bytes"
    length: int  # bytes
    dtype: str | None = None  # of a tensor: "float32", "bfloat16", …
    shape: tuple[int, ...] | None = None
    #: The shape of the tensor that this is a part of. None: it is a whole one.
    global_shape: tuple[int, ...] | None = None
    #: Which part it is: the indexes in each dimension, as (start, length) of contiguous runs.
    layout: tuple[tuple[tuple[int, int], ...], ...] | None = None
    #: The rank and the object with the bytes. None: they are here, under this name.
    at: tuple[int, str] | None = None
    sum: int | None = None  # of its bytes, eight at a time, if ranks compare what they share


@dataclass(frozen=True)
class Part:
    """A tensor, as plain_tensor() returns it, with the fields of its index entry in addition to dtype and
    shape; see ObjectInfo. With `at` the bytes are not saved here."""

    tensor: Any
    global_shape: tuple[int, ...] | None = None
    layout: tuple[tuple[tuple[int, int], ...], ...] | None = None
    at: tuple[int, str] | None = None
    sum: int | None = None


@dataclass
class Memory:
    """Bytes at an address, and their owner: keep `owner` as long as the address is used."""

    address: int | None
    length: int
    owner: object
    #: For CUDA memory: torch's current stream; the bytes are complete after its work. None: host memory.
    stream: Any = None
    #: The owner is a temporary copy, not the caller's object.
    temporary: bool = False


class _PyBuffer(ctypes.Structure):
    # Py_buffer: in CPython's stable ABI since 3.11 and unchanged since 3.0.
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_PYBUF_SIMPLE = 0
_PYBUF_WRITABLE = 1

_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


class _BufferExport:
    """Holds an export of a buffer, so that the exporter neither moves nor frees it (a bytearray cannot be
    resized)."""

    def __init__(self, exporter: object, writable: bool) -> None:
        self._buffer = _PyBuffer()
        # Raises BufferError for memory that is not contiguous or, when asked for, not writable.
        _get_buffer(exporter, ctypes.byref(self._buffer), _PYBUF_WRITABLE if writable else _PYBUF_SIMPLE)
        self.address: int | None = self._buffer.buf
        self.length: int = self._buffer.len

    def __del__(self) -> None:
        if getattr(self, "length", None) is not None:
            _release_buffer(ctypes.byref(self._buffer))


def is_tensor(value: object) -> bool:
    """Whether this is a torch.Tensor, without an import of torch in a program that does not use it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_buffer(value: object) -> bool:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    try:
        memoryview(value).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


class NoBytes(Unsupported, TypeError):
    """A tensor that has no plain bytes here, now or later."""


def plain_tensor(tensor: Any, what: str) -> Any:
    """The tensor as a strided one in CPU or CUDA memory; for a DTensor, this rank's own part."""
    torch = sys.modules["torch"]
    if hasattr(tensor, "to_local"):
        if torch.is_grad_enabled():  # otherwise a DTensor goes through autograd, ten times slower
            with torch.no_grad():
                tensor = tensor.to_local()
        else:
            tensor = tensor.to_local()
        if hasattr(tensor, "wait"):  # a collective is still running
            tensor = tensor.wait()
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        _refuse_fake(tensor, what)
    if tensor.is_nested:
        raise NoBytes(
            f"{what}: a nested tensor is several tensors: save them by name, or values() and offsets()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise NoBytes(
            f"{what}: a {tensor.layout} tensor of {tensor.dtype}; only plain strided tensors have bytes"
        )
    if tensor.device.type == "meta":
        raise NoBytes(
            f"{what}: a tensor on the meta device has a shape and no bytes: allocate it first, for example "
            'with model.to_empty(device="cpu"), and fill it'
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise NoBytes(
            f"{what}: a tensor on {tensor.device}; only CPU and CUDA memory can be given, use .cpu()"
        )
    return tensor


def _refuse_fake(tensor: Any, what: str) -> None:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        raise NoBytes(
            f"{what}: a fake tensor of torch.compile or FakeTensorMode has a shape and no bytes: save the "
            "real model"
        )


def _tensor_memory(tensor: Any, length: int) -> Memory:
    if length == 0:
        return Memory(None, 0, tensor)
    stream = None
    if tensor.device.type == "cuda":
        stream = sys.modules["torch"].cuda.current_stream(tensor.device)
    return Memory(tensor.data_ptr(), length, tensor, stream)


def tensor_info(tensor: Any) -> ObjectInfo:
    return part_info(Part(tensor))


def part_info(part: Part) -> ObjectInfo:
    tensor = part.tensor
    return ObjectInfo(
        kind="tensor",
        length=tensor.nbytes if part.at is None else 0,
        dtype=str(tensor.dtype).split(".", 1)[-1],
        shape=tuple(tensor.shape),
        global_shape=part.global_shape,
        layout=part.layout,
        at=part.at,
        sum=part.sum,
    )


class Source:
    """A value to save: its description at once, the address of its bytes on request.

    Nothing is copied, with two exceptions. JSON is encoded. A tensor that is not contiguous (or is a lazy
    conjugate or negative) is made contiguous when its memory is requested, one at a time. TypeError: a value
    of this type cannot be saved.
    """

    def __init__(self, value: Value, what: str) -> None:
        self._tensor: Any = None
        self._export: _BufferExport | None = None
        if is_tensor(value):
            value = Part(plain_tensor(value, what))
        if isinstance(value, Part):
            self._tensor = value.tensor
            self.info = part_info(value)
            return
        kind = "bytes"
        if not is_buffer(value):
            kind = "json"
            try:
                value = encode_json(value)
            except (TypeError, ValueError) as error:
                what_it_is = f"a {type(value).__name__}"
                raise TypeError(
                    f"{what}: {what_it_is} is neither a tensor, a buffer nor a JSON value ({error})"
                ) from error
        try:
            self._export = _BufferExport(value, writable=False)
        except BufferError as error:
            raise InvalidArgument(f"{what}: the buffer is not contiguous: {error}") from error
        self.info = ObjectInfo(kind=kind, length=self._export.length)

    def memory(self) -> Memory:
        if self._export is not None:
            return Memory(self._export.address, self._export.length, self._export)
        tensor = self._tensor.resolve_conj().resolve_neg().contiguous()
        memory = _tensor_memory(tensor, self.info.length)
        memory.temporary = memory.address is not None and memory.address != self._tensor.data_ptr()
        return memory


def target_memory(target: Any, what: str) -> tuple[Memory, ObjectInfo]:
    """The memory of `target`, a contiguous tensor or a writable buffer, to be filled in place."""
    if is_tensor(target):
        tensor = plain_tensor(target, what)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise InvalidArgument(f"{what}: a tensor that is filled in place must be contiguous")
        info = tensor_info(tensor)
        return _tensor_memory(tensor, info.length), info
    try:
        export = _BufferExport(target, writable=True)
    except (BufferError, TypeError) as error:
        raise InvalidArgument(
            f"{what}: neither a tensor nor a writable contiguous buffer: {error}"
        ) from error
    return Memory(export.address, export.length, export), ObjectInfo(kind="bytes", length=export.length)


def new_tensor(info: ObjectInfo, what: str) -> Any:
    """An uninitialised tensor for the object's bytes."""
    import torch

    dtype = getattr(torch, info.dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"{what}: this torch ({torch.__version__}) has no dtype {info.dtype}")
    # Before it is allocated: the shape may come from anybody.
    length = math.prod(info.shape or ()) * torch.empty((), dtype=dtype).element_size()
    if length != info.length:
        raise Corrupt(
            f"{what}: {info.dtype} of shape {info.shape} takes {length} bytes, the object has {info.length}"
        )
    return torch.empty(info.shape or (), dtype=dtype)


def encode_json(value: JsonValue) -> bytes:
    """Compact UTF-8. Floats are preserved to the bit (also inf and nan, as Python writes them); tuples become
    lists. ValueError: a key is not a string; JSON would silently turn it into one."""
    _check_keys(value)
    return json.dumps(value, separators=(",", ":")).encode()


def encode_metadata(metadata: Mapping[str, JsonValue]) -> bytes:
    """A step's metadata as standard JSON: NaN and infinities become null; tensors without dimensions and
    numpy's scalars become numbers. TypeError: not a mapping of names to such values."""
    if not isinstance(metadata, Mapping):
        what_it_is = f"a {type(metadata).__name__}"
        raise TypeError(f"metadata is {what_it_is}: a mapping of names to JSON values is needed")
    try:
        return encode_json(_standard(metadata, ""))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: {error}") from error


def _standard(value: Any, where: str) -> Any:
    numpy = sys.modules.get("numpy")
    if is_tensor(value) or (numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray))):
        if value.ndim != 0:
            kind = f"{type(value).__name__} of shape {tuple(value.shape)}"
            raise TypeError(f"{where} is a {kind}: only tensors and arrays without dimensions are numbers")
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _standard(inner, f"{where}/{key}" if where else key) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard(inner, where) for inner in value]
    return value


def decode_metadata(encoded: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(encoded)
        if isinstance(metadata, dict):
            return metadata
    except (ValueError, RecursionError):
        pass
    raise Corrupt(f"the object {METADATA_NAME} is not a JSON object")


def _check_keys(value: object) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} is not a str")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        if isinstance(inner, (dict, list, tuple)):
            _check_keys(inner)


def encode_index(infos: Mapping[str, ObjectInfo], world_size: int) -> bytes | None:
    """The index object, or None if every object is plain bytes."""
    objects: dict[str, dict[str, Any]] = {}
    for name, info in infos.items():
        if info.kind == "tensor":
            entry = objects[name] = {"kind": "tensor", "dtype": info.dtype, "shape": list(info.shape or ())}
            if info.global_shape is not None:
                entry["global"] = list(info.global_shape)
            if info.layout is not None:
                entry["runs"] = [[number for run in runs for number in run] for runs in info.layout]
            if info.at is not None:
                entry["at"] = list(info.at)
            if info.sum is not None:
                entry["sum"] = info.sum
        elif info.kind != "bytes":
            objects[name] = {"kind": info.kind}
    if not objects:
        return None
    index = {"version": INDEX_VERSION, "world_size": world_size, "objects": objects}
    return json.dumps(index, separators=(",", ":")).encode()


#: As storage/format's kStepRanksMax.
_RANKS_MAX = 131072


@dataclass(frozen=True)
class Index:
    """A shard's index object, decoded."""

    objects: Mapping[str, Mapping[str, Any]]
    world_size: int | None = None  # the number of ranks that saved; None: version 1 does not have it


def decode_index(encoded: bytes) -> Index:
    try:
        index = json.loads(encoded)
        version, objects = index["version"], index["objects"]
        if version in (1, INDEX_VERSION) and all(isinstance(entry, dict) for entry in objects.values()):
            world_size = index["world_size"] if version > 1 else None
            if version > 1 and not 1 <= _number(world_size) <= _RANKS_MAX:
                raise ValueError(f"world_size is {world_size}, at least 1, limit {_RANKS_MAX}")
            return Index(objects, world_size)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"the object {INDEX_NAME} is not a shard's index: {error}") from error
    raise Unsupported(f"the shard's index has version {version}, this package reads 1 to {INDEX_VERSION}")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is not a number of 63 bits")
    return value


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.100} is not a list of numbers")
    return tuple(_number(value) for value in values)


def object_info(name: str, length: int, index: Mapping[str, Mapping[str, Any]]) -> ObjectInfo:
    """Corrupt: the entry is invalid."""
    entry = index.get(name)
    if entry is None:
        return ObjectInfo(kind="bytes", length=length)
    dtype, shape, whole, runs, at = (entry.get(key) for key in ("dtype", "shape", "global", "runs", "at"))
    try:
        if dtype is not None and not isinstance(dtype, str):
            raise ValueError(f"dtype {dtype!r:.100} is not a name")
        layout = None if runs is None else [_numbers(each) for each in runs]
        return ObjectInfo(
            kind=str(entry.get("kind", "bytes")),
            length=length,
            dtype=dtype,
            shape=None if shape is None else _numbers(shape),
            global_shape=None if whole is None else _numbers(whole),
            layout=None if layout is None else tuple(tuple(zip(each[::2], each[1::2])) for each in layout),
            at=None if at is None else (_number(at[0]), str(at[1])),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise Corrupt(f"the index's entry of {name} is invalid: {error}") from error
