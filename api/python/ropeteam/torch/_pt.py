# SPDX-License-Identifier: Apache-2.0
"""The output of torch.save for any object, as pieces: its tensors' own memory between short strings.

torch.save's file is a zip: a pickle of the object without its tensors' bytes, one record for each storage,
and the directory. With torch.serialization.skip_data it writes everything but the storages, and seeks over
these. The zip's CRC32 for them is then 0, which torch.load does not check. On storage such an object is a
file that torch.load opens (docs/frameworks.md). save() writes one to ropeteam://."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import types
from collections.abc import Callable, Iterable
from typing import Any, Union

import torch

from .._errors import Corrupt, RopeteamError
from ._unpickle import Unpickler, weights

#: Classes that a file of DeepSpeed may have, and a sharded object of Megatron-Core.
DEEPSPEED = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
MEGATRON = (
    "_io.BytesIO",
    "argparse.Namespace",
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
)

Parts = list[Union[bytes, torch.Tensor]]


class _Capture(io.RawIOBase):
    """Records what torch.save writes, and how far it seeks."""

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


def save(obj: Any, f: Any) -> None:
    """torch.save(obj, f) for a file of ropeteam:// that is open for writing. Any other `f`, also a path, is
    passed to torch.save.

        with fsspec.open("ropeteam://100/model.pt", "wb") as file:
            ropeteam.torch.save(model.state_dict(), file)

    torch.load reads the file like torch.save's own, also with mmap=True and weights_only=True. The tensors'
    bytes are copied once, from their place (also in CUDA memory) into the arena, and get Ropeteam's CRC32C on
    the way. Their CRC32 in the zip, for which torch.save takes several times as long, is 0: torch.load never
    checks it, but Python's zipfile and unzip do. Errors are those of torch.save and Save.put_parts()."""
    parts = None
    if hasattr(f, "put_parts"):
        with contextlib.suppress(RuntimeError):  # skip_data refuses quantized and nested tensors
            parts = _around_tensors(obj)
    if parts is None:
        torch.save(obj, f)  # type: ignore[no-untyped-call, unused-ignore]
    else:
        f.put_parts(parts)


def pt_file(value: Any, check: Callable[[set[str]], None] | None = None) -> Parts:
    """The pieces of torch.save(value). They share the tensors' memory: put them before it changes.

    check: called with the names of the classes and functions that the pickle needs, "module.name"."""
    parts = _around_tensors(value, check)
    if parts is None:
        parts = [pickled(value)]
    return parts


def pickled(value: Any) -> bytes:
    """By torch.save itself, data included."""
    buffer = io.BytesIO()
    torch.save(value, buffer)  # type: ignore[no-untyped-call, unused-ignore]
    return buffer.getvalue()


def _around_tensors(value: Any, check: Callable[[set[str]], None] | None = None) -> Parts | None:
    """As pt_file(). None: only torch.save itself can write this value."""
    storages: dict[str, torch.UntypedStorage] = {}  # by their key in the file
    pickled: list[io.BytesIO] = []

    class Pickler(pickle.Pickler):
        """torch.save derives its own from this; its persistent_id() gives each storage a key."""

        def __init__(self, file: io.BytesIO, protocol: int) -> None:
            super().__init__(file, protocol)
            pickled.append(file)

        def __init_subclass__(cls) -> None:
            theirs: Any = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                found = theirs(self, obj)
                if found is not None:
                    typed = isinstance(obj, torch.storage.TypedStorage)
                    storages[found[2]] = obj._untyped_storage if typed else obj
                return found

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    module: Any = types.SimpleNamespace(Pickler=Pickler, __name__="pickle")
    capture = _Capture()
    try:
        with torch.serialization.skip_data():
            torch.save(value, capture, pickle_module=module)  # type: ignore[no-untyped-call, unused-ignore]
        filled = [storage for storage in storages.values() if storage.nbytes() > 0]
    finally:
        storages.clear()  # the classes above are garbage in a cycle, and would keep them for long
    if check is not None:
        check(set(_globals(pickled[0].getvalue())))
    if [storage.nbytes() for storage in filled] != capture.holes:
        return None
    if any(storage.device.type not in ("cpu", "cuda") for storage in filled):
        return None
    parts: Parts = [bytes(capture.texts[0])]
    for storage, text in zip(filled, capture.texts[1:]):
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
        parts += [raw.set_(storage, 0, (storage.nbytes(),), (1,)), bytes(text)]
    return parts


def load_pt(
    file: memoryview, classes: Iterable[str] = (), map_location: Any = None, trust: str = Unpickler.trust
) -> Any:
    """The object of a file that torch.save wrote. The pickle in it may use what weights(classes) of
    _unpickle.py has; no code of the file is run.

    Unsupported: it needs more; the text ends with `trust`. Corrupt: the file is damaged, or torch.save did
    not write it."""
    pickler = type("Unpickler", (Unpickler,), {"table": weights(classes), "trust": trust})
    # torch.load would decide by the environment and by the file's first bytes which unpickler it uses.
    try:
        with torch.serialization._open_zipfile_reader(_Mapped(file)) as archive:
            module = types.SimpleNamespace(Unpickler=pickler)
            return torch.serialization._load(archive, map_location, module, encoding="utf-8")
    except (RopeteamError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, pickle and the classes' own code may raise anything
        raise Corrupt(f"not an intact file of torch.save: {type(error).__name__}: {error}") from error


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
