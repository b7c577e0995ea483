# SPDX-License-Identifier: Apache-2.0
"""ropeteam.dcp writes the same files as torch's FileSystemWriter, and each reads the other's. Every case is
saved by both. The files are compared byte by byte, except CRCs and serialization ids. Both readers load the
files of both."""

from __future__ import annotations

import collections
import dataclasses
import io
import pathlib
import pickle
import re
import zipfile

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402
import ropeteam  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ropeteam.dcp import StorageReader, StorageWriter  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DIRECTORY = 9  # the step of FileSystemWriter's files in Ropeteam


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=0, world_size=1) as client:
        yield client


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers(*shape, dtype=torch.float32):
    count = int(torch.Size(shape).numel())
    return (torch.arange(count) % 120).to(torch.float32).to(dtype).reshape(shape)


def masked(item: bytes) -> bytes:
    """A torch.save file with the data's CRC32s and the serialization id set to zero."""
    if not item.startswith(b"PK"):
        return item
    archive = zipfile.ZipFile(io.BytesIO(item))
    out = bytearray(item)
    entry = archive.start_dir
    for info in archive.infolist():
        assert item[entry : entry + 4] == b"PK\x01\x02"
        sizes = [int.from_bytes(item[entry + at : entry + at + 2], "little") for at in (28, 30, 32)]
        if re.search(r"/data/\d+$|/\.data/serialization_id$", info.filename):
            at = info.header_offset
            names = [int.from_bytes(item[at + field : at + field + 2], "little") for field in (26, 28)]
            begin = at + 30 + sum(names)
            end = begin + info.file_size
            if info.file_size == 0:
                continue  # it has neither data nor CRC
            assert item[end : end + 4] == b"PK\x07\x08"
            out[end + 4 : end + 8] = out[entry + 16 : entry + 20] = bytes(4)
            if info.filename.endswith("serialization_id"):
                out[begin:end] = bytes(info.file_size)
        entry += 46 + sum(sizes)
    return bytes(out)


def split(files: dict[str, bytes], metadata) -> dict:
    """Each item's masked bytes by its index, and the length of each file."""
    found = {name: len(data) for name, data in files.items() if not name.endswith(".metadata")}
    for index, info in metadata.storage_data.items():
        data = files[info.relative_path][info.offset : info.offset + info.length]
        assert len(data) == info.length
        found[index, info.relative_path, info.offset] = masked(data)
    return found


def without_ids(metadata: bytes) -> bytes:
    value = pickle.loads(metadata)
    assert value.storage_meta.save_id
    return pickle.dumps(dataclasses.replace(value, storage_meta=None))


def objects(rope, step: int) -> dict[str, bytes]:
    with rope.view(step, 0) as view:
        return {name: view.read(name) for name in view.names()}


def directory_files(path: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def check_same_files(theirs: dict[str, bytes], ours: dict[str, bytes], in_order: bool = True) -> None:
    assert sorted(theirs) == sorted(ours)
    (name,) = (name for name in theirs if name.endswith(".metadata"))
    one, other = pickle.loads(theirs[name]), pickle.loads(ours[name])
    assert split(theirs, one) == split(ours, other)
    if in_order:  # with threads, the order of torch's results is random
        assert without_ids(theirs[name]) == without_ids(ours[name])
    else:
        assert (one.state_dict_metadata, one.planner_data) == (other.state_dict_metadata, other.planner_data)


def put_directory(rope, files: dict[str, bytes]) -> None:
    """Saves a checkpoint of FileSystemWriter as `ropeteam import` would."""
    rope.save(DIRECTORY, files)


def load_all(reader) -> dict:
    state: dict = {}
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        one, other = (
            x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)
        )
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and one == other


def check_crosswise(rope, step: int, theirs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Loads everything in four ways, which must give bit-identical values."""
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, data in objects(rope, step).items():
        (exported / name).write_bytes(data)
    put_directory(rope, directory_files(theirs))
    expected = load_all(dcp.FileSystemReader(theirs))
    for reader in (
        dcp.FileSystemReader(exported),
        StorageReader(rope, step),
        StorageReader(rope, DIRECTORY),
    ):
        assert same(expected, load_all(reader)), reader


# ---- states

BASE = numbers(40, 10)
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
]


def trained():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


STATES = {
    **{str(dtype): (lambda dtype=dtype: {"x": numbers(5, 7, dtype=dtype)}) for dtype in DTYPES},
    "tied": lambda: (lambda t: {"a": t, "b": t})(numbers(6, 6)),
    "two views of one storage": lambda: {"a": BASE[:10], "b": BASE[5:30]},
    "a view and its base": lambda: {"base": BASE, "row": BASE[3], "flat": BASE.view(-1)},
    "two dtypes of one storage": lambda: {"a": BASE, "b": BASE.view(torch.int32)},
    "empty": lambda: {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(3, 0, dtype=torch.int64)},
    "an empty part of a storage": lambda: {"a": BASE[:0], "b": BASE[:, :0]},
    "0-dim": lambda: {"a": torch.tensor(3.5), "b": torch.tensor(7), "c": torch.tensor(True)},
    "0-dim of a storage": lambda: {"a": BASE[2, 3]},
    "one element": lambda: {"a": torch.ones(1), "b": torch.ones(1, 1, 1)},
    "transposed": lambda: {"a": numbers(4, 6).t()},
    "permuted": lambda: {"a": numbers(2, 3, 4).permute(2, 0, 1)},
    "channels last": lambda: {"a": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "rows": lambda: {"a": BASE[10:20]},
    "transposed rows": lambda: {"a": BASE[10:20].t()},
    "columns": lambda: {"a": BASE[:, 2:5]},
    "every other row": lambda: {"a": BASE[::2]},
    "every other element": lambda: {"a": BASE.reshape(-1)[::3]},
    "expanded": lambda: {"a": numbers(1, 5).expand(4, 5), "b": torch.tensor(2.0).expand(3)},
    "overlapping": lambda: {
        "a": numbers(12).as_strided((3, 4), (2, 1)),
        "b": numbers(12).as_strided((3, 4), (4, 1), 0),
    },
    "conjugate": lambda: {
        "a": numbers(3, dtype=torch.complex64).conj(),
        "b": numbers(9, dtype=torch.complex64)[2:5].conj(),
    },
    "negative": lambda: {"a": numbers(3, dtype=torch.complex64).conj().imag},
    "parameters": lambda: {"a": torch.nn.Parameter(numbers(3, 4)), "b": numbers(3).requires_grad_()},
    "a buffer": lambda: {"a": torch.nn.Buffer(numbers(3, 4))},
    "an optimizer and a model": trained,
    "nested": lambda: {
        "a": {"b": {"c": numbers(3), "d": 4}},
        "l": [numbers(2), {"m": numbers(1)}],
        "t": (1, 2),
    },
    "a tuple with a tensor": lambda: {"a": (numbers(3), 2)},
    "dots in names": lambda: {"a.b": {"c.d": numbers(2)}, "x/y": numbers(2), "ü": numbers(1)},
    "a long name": lambda: {"n" * 300: numbers(2)},
    "ordered": lambda: collections.OrderedDict(b=numbers(2), a=collections.OrderedDict(z=1, y=numbers(1))),
    "values": lambda: {
        "i": 3,
        "f": 1e-3,
        "inf": float("inf"),
        "s": "text",
        "n": None,
        "t": True,
        "c": 1j,
        "b": b"\0\1",
    },
    "zeros of both signs": lambda: {"a": 0.0, "b": -0.0, "c": 0, "d": False},
    "containers": lambda: {
        "l": [1, "a", None],
        "e": [],
        "set": {1, 2},
        "dict": {"k": [1.5]},
        "size": torch.Size([1, 2]),
    },
    "numpy": lambda: {"a": numpy.arange(6).reshape(2, 3), "s": numpy.float32(2.5)},
    "only values": lambda: {"a": 1, "b": "x"},
    "nothing": lambda: {},
    "many": lambda: {f"layer{i}.weight": numbers(3, i) for i in range(60)},
    "a larger one": lambda: {"a": numbers(1000, 500), "b": numbers(700, 300, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_the_same_in_files_and_loaded_crosswise(rope, tmp_path, name):
    theirs = tmp_path / "theirs"
    state = STATES[name]()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs))
    dcp.save(state, storage_writer=StorageWriter(rope, 1))
    check_same_files(directory_files(theirs), objects(rope, 1))
    check_crosswise(rope, 1, theirs, tmp_path)


@pytest.mark.parametrize("name", STATES)
def test_an_asynchronous_save_is_the_same_staged_in_memory_and_in_the_arena(rope, fake, tmp_path, name):
    theirs = tmp_path / "theirs"
    state = STATES[name]()
    if name in ("conjugate", "negative"):  # torch's stager loses the conjugate and negative bits
        dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs))
    else:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        dcp.async_save(state, storage_writer=dcp.FileSystemWriter(theirs), async_stager=stager).result()
    for step in (1, 2):
        dcp.async_save(state, storage_writer=StorageWriter(rope, step)).result()
        check_same_files(directory_files(theirs), objects(rope, step))
    check_crosswise(rope, 2, theirs, tmp_path)


SPLIT = {
    "a": numbers(30, 10),
    "b": numbers(10, 10),
    "c": numbers(200),
    "d": 5,
    "e": "text",
    "f": numbers(3).t(),
    "g": 6,
}
LAYOUTS = {
    "a file for each item": dict(single_file_per_rank=False),
    "2 threads": dict(thread_count=2),
    "3 threads": dict(thread_count=3),
    "more threads than items": dict(thread_count=9),
    "2 threads and a file for each item": dict(single_file_per_rank=False, thread_count=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_layout_is_the_same(rope, tmp_path, name, asynchronous):
    theirs = tmp_path / "theirs"
    dcp.save(SPLIT, storage_writer=dcp.FileSystemWriter(theirs, **LAYOUTS[name]))
    for step in (1, 2):
        writer = StorageWriter(rope, step, **LAYOUTS[name])
        if asynchronous:
            dcp.async_save(SPLIT, storage_writer=writer).result()
        else:
            dcp.save(SPLIT, storage_writer=writer)
        check_same_files(directory_files(theirs), objects(rope, step), in_order="threads" not in name)
    check_crosswise(rope, 2, theirs, tmp_path)


# ---- planners, partial loads, errors


class Halves(DefaultSavePlanner):
    """Saves floating point as bfloat16."""

    def transform_object(self, write_item, object):
        if isinstance(object, torch.Tensor):
            object = object.to(torch.bfloat16)
        return super().transform_object(write_item, object)


class Scaled(DefaultSavePlanner):
    """Saves other values of the same structure."""

    def set_up_planner(self, state_dict, *args, **kwargs):
        super().set_up_planner({key: value * 2 for key, value in state_dict.items()}, *args, **kwargs)


PLANNERS = {
    "flat": lambda: DefaultSavePlanner(flatten_state_dict=False),
    "cached": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "another dtype": Halves,
    "other values": Scaled,
}


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_planner_is_asked_as_torchs_writer_asks_it(rope, tmp_path, name, asynchronous):
    theirs = tmp_path / "theirs"
    make = PLANNERS[name]
    state = {"a": numbers(4, 5), "b": numbers(9)}
    forget_plans()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs), planner=make())
    forget_plans()
    for step in (1, 2, 3):
        writer = StorageWriter(rope, step)
        if asynchronous:
            dcp.async_save(state, storage_writer=writer, planner=make()).result()
        else:
            dcp.save(state, storage_writer=writer, planner=make())
        check_same_files(directory_files(theirs), objects(rope, step))
    check_crosswise(rope, 3, theirs, tmp_path)


def forget_plans():
    for cache in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(dcp.planner.SavePlanner, cache).clear()
    dcp.planner.SavePlanner._cached_metadata.clear()


SAVED = {"w": numbers(20, 10), "v": numbers(7, dtype=torch.bfloat16), "n": {"k": 3, "t": numbers(2, 2)}}
LOADS = {
    "all": lambda: {
        "w": torch.zeros(20, 10),
        "v": torch.zeros(7, dtype=torch.bfloat16),
        "n": {"k": 0, "t": torch.zeros(2, 2)},
    },
    "one tensor": lambda: {"w": torch.zeros(20, 10)},
    "one value": lambda: {"n": {"k": 0}},
    "nothing": lambda: {},
    "into a transposed one": lambda: {"w": torch.zeros(10, 20).t()},
    "into a column slice": lambda: {"w": torch.zeros(20, 30)[:, 5:15]},
    "into every other element": lambda: {"v": torch.zeros(14, dtype=torch.bfloat16)[::2]},
    "into another dtype": lambda: {"w": torch.zeros(20, 10, dtype=torch.float64), "v": torch.zeros(7)},
    "into a parameter": lambda: {"w": torch.nn.Parameter(torch.zeros(20, 10))},
    "a missing key": lambda: {"w": torch.zeros(20, 10), "x": torch.zeros(1)},
    "another shape": lambda: {"w": torch.zeros(10, 20)},
    "a tensor for a value": lambda: {"n": {"k": torch.zeros(1)}},
    "a value for a tensor": lambda: {"w": 0},
}


def outcome(state, reader, **planner):
    """The state after a load, or the error's class and text."""
    try:
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(**planner))
    except (Exception, dcp.api.CheckpointException) as error:
        return type(error), re.sub(r"line \d+.*", "", str(error).splitlines()[-1])
    return state


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("partial", [False, True])
def test_a_load_of_a_part_or_of_something_else_ends_as_torchs_does(rope, tmp_path, name, partial):
    theirs = tmp_path / "theirs"
    dcp.save(SAVED, storage_writer=dcp.FileSystemWriter(theirs))
    dcp.save(SAVED, storage_writer=StorageWriter(rope, 1))
    expected = outcome(LOADS[name](), dcp.FileSystemReader(theirs), allow_partial_load=partial)
    result = outcome(LOADS[name](), StorageReader(rope, 1), allow_partial_load=partial)
    if isinstance(expected, tuple):
        assert result == expected
    else:
        assert same(expected, result)


UNSAVABLE = {
    "a name twice": {"a.b": 1, "a": {"b": 2}},
    "a function": {"f": lambda: 0},
    "sparse": {"s": torch.eye(3).to_sparse()},
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_torchs_writer_does_not_save_is_the_same_error_and_leaves_nothing(rope, fake, tmp_path, name):
    handles = fake.fake_handles()
    with pytest.raises(BaseException) as theirs:
        dcp.save(UNSAVABLE[name], storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    with pytest.raises(type(theirs.value)) as ours:
        dcp.save(UNSAVABLE[name], storage_writer=StorageWriter(rope, 1))
    assert str(ours.value).splitlines()[-1] == str(theirs.value).splitlines()[-1]
    assert fake.fake_handles() == handles
    dcp.save({"a": 1}, storage_writer=StorageWriter(rope, 2))


# ---- with a process group: DTensors, and metadata of each rank


def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    one, two = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    return {
        "rows": distribute_tensor(numbers(7, 3), one, [Shard(0)]),
        "columns": distribute_tensor(numbers(7, 3), one, [Shard(1)]),
        "replicated": distribute_tensor(numbers(4), one, [Replicate()]),
        "both": distribute_tensor(numbers(6, 4), two, [Shard(0), Shard(1)]),
        "hybrid": distribute_tensor(numbers(6, 4), two, [Replicate(), Shard(0)]),
        "strided": DTensor.from_local(numbers(5, 4).t(), one, [Shard(0)]),
        "part": DTensor.from_local(BASE[4:8], one, [Shard(0)]),
        "empty": DTensor.from_local(torch.empty(0, 3), one, [Shard(0)]),
        "bfloat16": distribute_tensor(numbers(8, dtype=torch.bfloat16), one, [Shard(0)]),
        "plain": numbers(3),
        "value": 5,
    }


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_dtensors_are_the_same_in_files_and_loaded_crosswise(
    rope, group, tmp_path, use_collectives, asynchronous
):
    theirs = tmp_path / "theirs"
    state = dtensors()
    options = dict(use_collectives=use_collectives)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs), **options)
    for step in (1, 2):
        if asynchronous:
            dcp.async_save(state, storage_writer=StorageWriter(rope, step), **options).result()
        else:
            dcp.save(state, storage_writer=StorageWriter(rope, step), **options)
        check_same_files(directory_files(theirs), objects(rope, step))
    put_directory(rope, directory_files(theirs))
    for reader in (StorageReader(rope, 2), StorageReader(rope, DIRECTORY), dcp.FileSystemReader(theirs)):
        loaded = {
            name: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0
            for name, leaf in state.items()
        }
        dcp.load(loaded, storage_reader=reader)
        for name, leaf in state.items():
            one, other = (x.to_local() if hasattr(x, "to_local") else x for x in (leaf, loaded[name]))
            assert same(one, other), (reader, name)


# ---- safetensors


TENSORS = {
    "some": lambda: {
        "b": numbers(3, 4),
        "a": numbers(5, dtype=torch.bfloat16),
        "c": numbers(2, dtype=torch.int64),
    },
    "one": lambda: {"a": numbers(100)},
    "0-dim and empty": lambda: {
        "a": torch.tensor(2.5),
        "b": torch.empty(0, 3),
        "c": numbers(3, dtype=torch.bool),
    },
    "part of a storage": lambda: {"a": BASE[3:9], "b": BASE[20:21]},
    "float8": lambda: {"a": numbers(5, dtype=torch.float8_e4m3fn), "b": numbers(3, dtype=torch.float8_e5m2)},
    "a long name": lambda: {"é" * 200: numbers(3), "x": numbers(1)},
    "a value too": lambda: {"a": numbers(3), "n": 4},
}


def safetensors_parts(data: bytes) -> tuple:
    """The header as a dict, since the library writes its metadata in random order, and the data."""
    import json

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return length, list(header)[1:], header, data[8 + length :]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_safetensors_are_the_same(rope, tmp_path, name, asynchronous):
    pytest.importorskip("safetensors")
    theirs = tmp_path / "theirs"
    state = TENSORS[name]()
    options = dict(serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs, **options))
    for step in (1, 2):
        writer = StorageWriter(rope, step, **options)
        if asynchronous:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
        expected, files = directory_files(theirs), objects(rope, step)
        assert without_ids(expected[".metadata"]) == without_ids(files[".metadata"])
        begin = pickle.loads(files[".metadata"]).storage_data
        at = max((info.offset for info in begin.values()), default=0)
        one, other = expected["__0_0.distcp"], files["__0_0.distcp"]
        assert one[:at] == other[:at]
        assert safetensors_parts(one[at:]) == safetensors_parts(other[at:])
    # torch's FileSystemReader cannot read safetensors; ours reads the files of both.
    put_directory(rope, directory_files(theirs))
    for step in (2, DIRECTORY):
        loaded = {key: torch.zeros_like(value) if key != "n" else 0 for key, value in state.items()}
        dcp.load(loaded, storage_reader=StorageReader(rope, step))
        assert same(state, loaded)
