# SPDX-License-Identifier: Apache-2.0
"""A step on storage can be read without Ropeteam: with safetensors, json and torch.

ropeteam-write-step (tests/storage/format) writes the step from objects that the Python package makes.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")

from ropeteam import _values  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ROPETEAM_BUILD", ROOT / "build" / "release"))
WRITE_STEP = BUILD / "tests" / "storage" / "format" / "ropeteam-write-step"

if not WRITE_STEP.exists():
    pytest.skip(f"{WRITE_STEP} is not built", allow_module_level=True)

KNOWN = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
UNKNOWN = "complex64 complex128 float8_e8m0fnu float8_e4m3fnuz"


def to_bytes(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def random_tensor(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def rank_objects(values):
    """The (name, bytes) pairs that the package puts into a shard for these values."""
    objects, infos = [], {}
    for name, value in values.items():
        if _values.is_tensor(value):
            infos[name], data = _values.tensor_info(value), to_bytes(value)
        elif isinstance(value, bytes):
            infos[name], data = _values.ObjectInfo(kind="bytes", length=len(value)), value
        else:
            data = _values.encode_json(value)
            infos[name] = _values.ObjectInfo(kind="json", length=len(data))
        objects.append((name.encode(), data))
    index = _values.encode_index(infos, 1)
    if index is not None:
        objects.append((_values.INDEX_NAME.encode(), index))
    return objects


def write_step(tmp_path, ranks):
    """Writes a step of these ranks' (name, bytes) pairs; returns its folder."""
    for rank, objects in enumerate(ranks):
        folder = tmp_path / "shards" / str(rank)
        folder.mkdir(parents=True)
        (folder / "names").write_bytes(b"".join(name + b"\0" for name, _ in objects))
        for number, (_, data) in enumerate(objects):
            (folder / str(number)).write_bytes(data)
    step = tmp_path / "step-0000000100-i00000003"
    subprocess.run([WRITE_STEP, tmp_path / "shards", step], check=True)
    return step


def crc32c(data):
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return f"{crc ^ 0xFFFFFFFF:08x}"


def read_rank_file(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and to_bytes(a) == to_bytes(b)


def test_tensors_of_every_dtype_come_back(tmp_path):
    values = {}
    for seed, name in enumerate(f"{KNOWN} {UNKNOWN}".split()):
        dtype = getattr(torch, name)
        for shape in ((3, 5), (), (0, 7), (1,), (4097,)):
            values[f"{name}/{'x'.join(map(str, shape))}"] = random_tensor(dtype, shape, seed)
    step = write_step(tmp_path, [rank_objects(values)])
    tensors, metadata = read_rank_file(step / "rank-00000.safetensors")
    assert tensors.keys() == values.keys()
    described = json.loads(metadata["ropeteam.dtypes"])
    for name, value in values.items():
        if name.split("/")[0] in KNOWN.split():
            assert same(tensors[name], value), name
            assert name not in described
        else:
            assert tensors[name].dtype == torch.uint8 and to_bytes(tensors[name]) == to_bytes(value), name
            assert described[name] == {"dtype": name.split("/")[0], "shape": list(value.shape)}
    # The library's other ways to read a file give the same.
    import safetensors.torch

    for loaded in (
        safetensors.torch.load_file(step / "rank-00000.safetensors"),
        safetensors.torch.load((step / "rank-00000.safetensors").read_bytes()),
    ):
        assert all(same(loaded[name], tensors[name]) for name in values)


def test_numpy_reads_it_too(tmp_path):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    import safetensors.numpy

    values = {"odd": b"x", "f": torch.arange(6, dtype=torch.float64).reshape(2, 3), "u": torch.arange(3, dtype=torch.int16)}
    step = write_step(tmp_path, [rank_objects(values)])
    arrays = safetensors.numpy.load_file(step / "rank-00000.safetensors")
    assert arrays["odd"].tobytes() == b"x"
    assert numpy.array_equal(arrays["f"], values["f"].numpy())
    assert numpy.array_equal(arrays["u"], values["u"].numpy())


def test_json_values_stand_in_the_metadata(tmp_path):
    data = {"position": 1 << 60, "seed": [0.1, float("inf"), None, True], "name": 'é\u2028"\\\n\x01😀'}
    big = list(range(20000))
    step = write_step(tmp_path, [rank_objects({"data": data, "big": big, "raw": b"\xff\x00"})])
    tensors, metadata = read_rank_file(step / "rank-00000.safetensors")
    assert json.loads(metadata["data"]) == data
    assert json.loads(to_bytes(tensors["big"])) == big
    assert to_bytes(tensors["raw"]) == b"\xff\x00"
    assert set(tensors) == {"big", "raw"}
    assert metadata["ropeteam.order"] == "j1 t2 j1"
    assert _values.decode_index(metadata[".ropeteam/index"].encode()).objects["data"] == {"kind": "json"}


def test_odd_names_are_mapped_and_told(tmp_path):
    objects = [
        (b"__metadata__", b"a"),
        (b"w\xff%", b"b"),
        (b"ropeteam.x", b"c"),
        ("é \u2028\"\\\n\x01".encode(), b"d"),
        (b"../up.pt", b"e"),
    ]
    step = write_step(tmp_path, [objects])
    tensors, metadata = read_rank_file(step / "rank-00000.safetensors")
    names = json.loads(metadata["ropeteam.names"])
    assert names == {
        "ropeteam.object.0": "__metadata__",
        "ropeteam.object.1": "w%ff%25",
        "ropeteam.object.2": "ropeteam.x",
    }
    assert {name: to_bytes(tensor) for name, tensor in tensors.items()} == {
        "ropeteam.object.0": b"a",
        "ropeteam.object.1": b"b",
        "ropeteam.object.2": b"c",
        "é \u2028\"\\\n\x01": b"d",
        "../up.pt": b"e",
    }


def test_the_manifest_has_every_file_and_no_other(tmp_path):
    ranks = []
    for rank in range(3):
        files = [(b"config.json", b"{}" if rank < 2 else b"[2]"), (f"sub/{rank}.pt".encode(), bytes(range(200)) * rank)]
        ranks.append([*files, *rank_objects({"w": torch.full((1000 * rank,), float(rank))})])
    ranks.append([(b".metadata", b"m")])
    ranks.append([])
    step = write_step(tmp_path, ranks)
    text = (step / "ropeteam-manifest.json").read_bytes()
    manifest = json.loads(text)
    assert {key: manifest[key] for key in list(manifest)[:9]} == {
        "format": "ropeteam-step",
        "version": 1,
        "job": "train",
        "step": 100,
        "incarnation": 3,
        "world_size": 5,
        "chunk_bytes": 4096,
        "time": "2026-11-22T07:30:24Z",
        "user": {"loss": 0.25, "tags": ["a"]},
    }
    assert [[file["path"] for file in rank["files"]] for rank in manifest["ranks"]] == [
        ["rank-00000.safetensors", "config.json", "sub/0.pt"],
        ["rank-00001.safetensors", "config.json", "sub/1.pt"],
        ["rank-00002.safetensors", "rank-00002/config.json", "sub/2.pt"],
        [".metadata"],
        [],
    ]
    listed = {file["path"]: file for rank in manifest["ranks"] for file in rank["files"]}
    found = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert found == {*listed, "ropeteam-manifest.json"}
    for path, file in listed.items():
        data = (step / path).read_bytes()
        assert (len(data), crc32c(data)) == (file["bytes"], file["crc32c"]), path
        if "header_bytes" in file:
            header = file["header_bytes"]
            assert header % 4096 == 0 and int.from_bytes(data[:8], "little") == header - 8
            assert crc32c(data[:header]) == file["header_crc32c"]
    assert (step / "rank-00002/config.json").read_bytes() == b"[2]"
    assert manifest["manifest_crc32c"] == crc32c(text[: text.rindex(b'"manifest_crc32c"')])


def test_a_distributed_checkpoint_is_read_where_it_lies(tmp_path):
    import torch.distributed.checkpoint as dcp

    saved = {"w": torch.randn(100, 3), "n": {"b": torch.arange(5)}}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    objects = [(path.name.encode(), path.read_bytes()) for path in sorted((tmp_path / "dcp").iterdir())]
    step = write_step(tmp_path, [[*objects, *rank_objects({"position": 7})]])
    loaded = {"w": torch.zeros(100, 3), "n": {"b": torch.zeros(5, dtype=torch.int64)}}
    dcp.load(loaded, checkpoint_id=step, no_dist=True)
    assert torch.equal(loaded["w"], saved["w"]) and torch.equal(loaded["n"]["b"], saved["n"]["b"])


def test_the_page_s_example_reads_it(tmp_path):
    ranks = [rank_objects({"w": torch.ones(2), "data": {"position": rank}}) for rank in range(2)]
    step = write_step(tmp_path, ranks)
    page = (ROOT / "docs" / "format-on-storage.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    output = subprocess.run(
        [sys.executable, "-c", example, step], check=True, capture_output=True, text=True
    ).stdout
    assert output == "0 ['w'] ['.ropeteam/index', 'data']\n1 ['w'] ['.ropeteam/index', 'data']\n"
