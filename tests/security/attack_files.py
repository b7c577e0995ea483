# SPDX-License-Identifier: Apache-2.0
"""Files as an attacker would write them, and a client whose step they are."""

from __future__ import annotations

import io
import pathlib
import zipfile

import torch
import torch.distributed.checkpoint as dcp
from ropeteam import NotFound
from ropeteam.dcp import StorageReader


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_pickle(pickled: bytes, file: bytes | None = None) -> bytes:
    """A file of torch.save that has this pickle instead of its own."""
    whole = zipfile.ZipFile(io.BytesIO(saved([torch.zeros(4)]) if file is None else file))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name in whole.namelist():
            made.writestr(name, pickled if name.endswith("/data.pkl") else whole.read(name))
    return out.getvalue()


def pickle_of(file: bytes) -> bytes:
    whole = zipfile.ZipFile(io.BytesIO(file))
    return whole.read(next(name for name in whole.namelist() if name.endswith("/data.pkl")))


class View:
    """A rank's shard that is a dict."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.step, self.rank = files, 1, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __contains__(self, name):
        return name in self.files

    def names(self):
        return list(self.files)

    def read(self, name, offset=0, length=None):
        return self.files[name][offset : None if length is None else offset + length]

    def read_ranges(self, ranges):
        for each in ranges:
            assert each.count == 1
            data = self.read(each.name, each.offset, each.length)
            if len(data) != each.length:
                raise NotFound(f"{each.name} ends before byte {each.offset + each.length}")
            if isinstance(each.target, bytearray):
                each.target[:] = data
            else:
                each.target[each.target_offset :][: each.length] = torch.frombuffer(data, dtype=torch.uint8)


class Rope:
    """A client with one step, of one rank."""

    rank = 0

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def view(self, step, rank, timeout, partial=False):
        if rank != 0:
            raise NotFound("one rank saved the step")
        return View(self.files)


def dcp_files(state, folder) -> dict[str, bytes]:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def read_metadata(pickled: bytes, **options):
    return StorageReader(Rope({".metadata": pickled}), 1, **options).read_metadata()


def dcp_load(files: dict[str, bytes], state, **options):
    dcp.load(state, storage_reader=StorageReader(Rope(files), 1, **options), no_dist=True)
    return state
