# SPDX-License-Identifier: Apache-2.0
"""What torch.save would write for any object, as pieces: its tensors' own memory between short strings.

torch.save's file is a zip: a pickle of the object without its tensors' bytes, one record for each storage,
and the directory. With torch.serialization.skip_data it writes everything but the storages, which it seeks
over. The zip's CRC32 of them is then 0, which torch.load does not look at. docs/frameworks.md: such an object
on storage is a file that torch.load opens."""

from __future__ import annotations

import importlib
import io
import pickle
import pickletools
import types
from collections.abc import Callable, Iterable
from typing import Any, Union

import torch

Parts = list[Union[bytes, torch.Tensor]]

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Capture(io.RawIOBase):
    """Takes what torch.save writes, and how far it seeks."""

    def __init__(self) -> None:
        self.texts = [bytearray()]
        self.holes: list[int] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.texts[-1].extend(view)
        return len(view)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.holes.append(offset)
        self.texts.append(bytearray())
        return 0


def pt_file(value: Any, check: Callable[[set[str]], None] | None = None) -> Parts:
    """The pieces of torch.save(value). They share the tensors' memory: put them before that changes.

    check: is given the names of the classes and functions that the pickle needs, "module.name"."""
    storages: dict[int, torch.UntypedStorage] = {}
    pickled: list[io.BytesIO] = []

    class Pickler(pickle.Pickler):
        def __init__(self, file: io.BytesIO, protocol: int) -> None:
            super().__init__(file, protocol)
            pickled.append(file)

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in _PLAIN_TENSORS and obj.layout == torch.strided:
                storage = obj.untyped_storage()
                storages.setdefault(storage._cdata, storage)
            return NotImplemented

    module: Any = types.SimpleNamespace(Pickler=Pickler, __name__="pickle")
    capture = _Capture()
    with torch.serialization.skip_data():
        torch.save(value, capture, pickle_module=module)  # type: ignore[no-untyped-call, unused-ignore]
    if check is not None:
        check(set(_globals(pickled[0].getvalue())))
    filled = [storage for storage in storages.values() if storage.nbytes() > 0]
    if [storage.nbytes() for storage in filled] != capture.holes:
        # A storage that no plain tensor has: torch.save alone knows it.
        buffer = io.BytesIO()
        torch.save(value, buffer)  # type: ignore[no-untyped-call, unused-ignore]
        return [buffer.getvalue()]
    parts: Parts = [bytes(capture.texts[0])]
    for storage, text in zip(filled, capture.texts[1:]):
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
        parts += [raw.set_(storage, 0, (storage.nbytes(),), (1,)), bytes(text)]
    return parts


def load_pt(file: memoryview, packages: Iterable[str], **options: Any) -> Any:
    """torch.load with weights_only=True, which takes the classes of these packages, too."""
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(_Mapped(file))
    allowed: list[Any] = []
    for name in unsafe:
        if name.split(".", 1)[0] in packages:
            module, _, attribute = name.rpartition(".")
            allowed.append((getattr(importlib.import_module(module), attribute), name))
    with torch.serialization.safe_globals(allowed):
        return torch.load(_Mapped(file), weights_only=True, **options)  # type: ignore[no-untyped-call, unused-ignore]


def _globals(pickled: bytes) -> Iterable[str]:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL":  # torch.save's protocol has no other
            yield str(argument).replace(" ", ".")


class _Mapped(io.RawIOBase):
    """A file over memory, which is not copied."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._memory))[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        found = self._memory[self._at : self._at + len(view)]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)
