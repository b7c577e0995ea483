# SPDX-License-Identifier: Apache-2.0
"""ropeteam:// for fsspec, and libraries that use fsspec, against real daemons."""

from __future__ import annotations

import io
import warnings

import pytest
from harness import WAIT_S, payload

import ropeteam
from ropeteam import Level

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
ropeteam.register_fsspec()


def filesystem(rope):
    return fsspec.filesystem("ropeteam", client=rope, timeout=WAIT_S)


@pytest.fixture
def rope(cluster):
    with cluster(1).nodes[0].open(0, 1) as rope:
        yield rope


@pytest.fixture
def two(cluster):
    """Two ranks on two nodes, with step 5 saved."""
    nodes = cluster(2)
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    for rank, each in enumerate(ranks):
        objects = {"model.pt": payload(rank, 5_000_001), f"only/of-{rank}.json": b"{}", "empty": b""}
        each.save(5, objects)
    for each in ranks:
        each.wait(5, Level.COMMITTED)
    yield ranks
    for each in ranks:
        each.close()


def test_steps_and_files_are_listed_with_their_owners(two):
    fs = filesystem(two[1])
    assert fs.ls("ropeteam://", detail=False) == ["5"]
    assert [entry["type"] for entry in fs.ls("")] == ["directory"]
    listed = {entry["name"]: (entry["type"], entry.get("rank"), entry["size"]) for entry in fs.ls("5")}
    assert listed == {
        "5/empty": ("file", 1, 0),
        "5/model.pt": ("file", 1, 5_000_001),
        "5/only": ("directory", None, 0),
        "5/rank-00000": ("directory", None, 0),
    }
    assert fs.find("ropeteam://5") == [
        "5/empty", "5/model.pt", "5/only/of-0.json", "5/only/of-1.json", "5/rank-00000/empty", "5/rank-00000/model.pt",
    ]  # fmt: skip
    assert fs.glob("ropeteam://5/only/*.json") == ["5/only/of-0.json", "5/only/of-1.json"]
    assert fs.ls("5/rank-00000", detail=False) == ["5/rank-00000/empty", "5/rank-00000/model.pt"]
    assert fs.ls("latest/only", detail=False) == ["latest/only/of-0.json", "latest/only/of-1.json"]
    assert fs.ls("5/model.pt") == [fs.info("5/model.pt")]
    assert [where for where, _, _ in fs.walk("5/only")] == ["5/only"]
    assert fs.isdir("5") and fs.isdir("5/only") and fs.isfile("5/model.pt")


def test_a_name_is_this_rank_s_then_the_lowest_s_unless_a_rank_is_named(two):
    ours, theirs = (filesystem(each) for each in two)
    for fs, rank in ((ours, 0), (theirs, 1)):
        assert fs.cat("ropeteam://5/model.pt") == payload(rank, 5_000_001)
        assert fs.cat("ropeteam://latest/rank-00000/model.pt") == payload(0, 5_000_001)
        assert fs.cat("5/rank-00001/model.pt") == payload(1, 5_000_001)
        for _ in range(2):  # the second pass uses what the first one has found
            assert fs.info("5/only/of-0.json")["rank"] == 0
            assert fs.info("5/only/of-1.json")["rank"] == 1


def test_what_is_not_there_is_a_file_that_is_not_found(two):
    fs = filesystem(two[0])
    for path in ("5/none", "6", "6/model.pt", "5/rank-00001/only/of-0.json", "5/rank-00002/empty", "x/y"):
        assert not fs.exists(path)
        for call in (fs.info, fs.ls, fs.cat_file, fs.open, fs.rm):
            with pytest.raises(FileNotFoundError, match="^(?!.*ropeteam://.*ropeteam://)"):
                call(f"ropeteam://{path}")


def test_reads_seek_and_take_ranges(two):
    fs = filesystem(two[0])
    ours, theirs = payload(0, 5_000_001), payload(1, 5_000_001)
    with fs.open("5/model.pt") as file:
        assert (file.read(7), file.tell()) == (ours[:7], 7)
        assert file.seek(4_194_300) == 4_194_300 and file.read(9) == ours[4_194_300:4_194_309]  # from two chunks
        assert file.seek(-3, io.SEEK_END) == 4_999_998 and file.read() == ours[-3:]
        assert file.seek(6_000_000) == 6_000_000 and file.read() == b""
        file.seek(0)
        assert file.read() == ours
    assert fs.cat_file("5/model.pt", -5, None) == ours[-5:]
    assert fs.cat_file("5/model.pt", 10, 9) == b""
    paths = ["5/model.pt", "5/rank-00001/model.pt", "5/none", "5/model.pt", "5/empty"]
    ranges = fs.cat_ranges(paths, [0, 4_000_000, 0, 4_999_990, 0], [3, 4_500_000, 1, None, None])
    assert isinstance(ranges.pop(2), FileNotFoundError)
    assert ranges == [ours[:3], theirs[4_000_000:4_500_000], ours[-11:], b""]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 1, on_error="raise")
    assert fs.cat_ranges(paths[:2], 1, 2) == [ours[1:2], theirs[1:2]]


def test_of_another_node_s_file_only_what_is_read_is_fetched(cluster):
    nodes = cluster(4)
    ranks = [nodes[rank].open(rank, 4, "run") for rank in range(4)]
    for rank, each in enumerate(ranks):
        each.save(1, {"big": payload(rank, 8_000_000)})
    for each in ranks:
        each.wait(1, Level.COMMITTED)
    reader = next(
        node for node in range(4) if all(c["id"]["rank"] != 0 for c in nodes[node].local_status()["copies"])
    )
    fs, data = filesystem(ranks[reader]), payload(0, 8_000_000)
    path = "ropeteam://1/rank-00000/big"
    assert fs.info(path)["size"] == len(data)
    assert fs.cat_ranges([path, path], [10, 6_000_000], [20, 6_500_000]) == [data[10:20], data[6_000_000:6_500_000]]
    with fs.open(path) as file:
        file.seek(5_000_000)
        assert file.read(100) == data[5_000_000:5_000_100]
    assert nodes[reader].local_status()["counters"]["fetch_bytes"] < 1.1 * (500_010 + (1 << 20))  # a file reads 1 MiB
    for each in ranks:
        each.close()


def test_a_file_is_a_shard_once_it_is_closed(rope):
    fs = filesystem(rope)
    data = payload(3, 3_000_000)
    with fs.open("ropeteam://1/sub/data.bin", "wb") as file:
        assert [file.write(data[:10]), file.write(data[10:2_000_000]), file.write(data[2_000_000:])][0] == 10
        assert file.tell() == len(data) and not fs.exists("1/sub/data.bin")
    rope.wait(1, Level.COMMITTED)
    assert fs.cat("latest/sub/data.bin") == data and fs.ls("", detail=False) == ["1"]
    assert dict(rope.load(1)) == {"sub/data.bin": data}
    with pytest.raises(ropeteam.AlreadyExists, match="within one `with fs.transaction:`"):
        fs.open("1/second", "wb")
    fs.pipe("2/rank-00000/empty", b"")
    assert rope.load(2)["empty"] == b""
    with pytest.raises(ropeteam.InvalidArgument, match="rank 0"):
        fs.open("3/rank-00001/x", "wb")
    with pytest.raises(ropeteam.InvalidArgument, match="step's number"):
        fs.open("latest/x", "wb")
    with pytest.raises(ropeteam.Unsupported, match="'ab'"):
        fs.open("3/x", "ab")


def test_rm_of_a_step_frees_its_memory_on_every_node(cluster):
    nodes = cluster(2, options=["--replicas", "1", "--keep-steps", "4"]).nodes
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    fs = filesystem(ranks[0])
    for step in (1, 2, 3, 4):
        for rank, each in enumerate(ranks):
            each.save(step, {f"of-{rank}": payload(step, 3_000_000)} | ({"more": b"x"} if step == 2 else {}))
        for each in ranks:
            each.wait(step, Level.COMMITTED)
    free = [node.local_status()["chunks_free"] for node in nodes]
    view = ranks[0].view(1, 1)
    fs.rm("ropeteam://1", recursive=True)
    assert fs.ls("", detail=False) == ["2", "3", "4"] and not fs.exists("1") and not fs.exists("1/of-0")
    for node, before in zip(nodes, free):
        held = [copy for copy in node.local_status()["copies"] if copy["id"]["step"] == 1]
        assert not held and node.local_status()["chunks_free"] > before
    assert view.read("of-1", 0, 100) == payload(1, 3_000_000)[:100], "an open view stays readable"
    view.close()
    for call, error in (
        (lambda: fs.rm("4", recursive=True), ropeteam.InvalidArgument),  # a restart needs it
        (lambda: fs.rm("latest", recursive=True), ropeteam.InvalidArgument),
        (lambda: fs.rm("1", recursive=True), FileNotFoundError),
        (lambda: fs.rm("2"), ValueError),
        (lambda: fs.rm("2/of-0"), NotImplementedError),
        (lambda: fs.rm(["2/of-0", "2/more"]), NotImplementedError),
        (lambda: fs.rm("", recursive=True), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert fs.ls("", detail=False) == ["2", "3", "4"]
    fs.rm("[23]", recursive=True)
    assert fs.ls("", detail=False) == ["4"] and ranks[1].latest().step == 4
    ranks[0].save(5, {"a": b"only this rank"})
    ranks[0].drop(5)
    with pytest.raises(ropeteam.Aborted, match="was dropped by rank 0"):
        ranks[0].wait(5)
    for each in ranks:
        each.close()


def test_the_only_file_of_a_step_takes_the_step_along(rope):
    fs = filesystem(rope)
    for step in (1, 2):
        fs.pipe(f"{step}/sub/data.bin", b"bytes")
        rope.wait(step, Level.COMMITTED)
    with pytest.raises(ropeteam.InvalidArgument, match="newest committed"):
        fs.rm("2/sub/data.bin")
    fs.rm("1/rank-00000/sub/data.bin")
    assert fs.ls("", detail=False) == ["2"] and fs.cat("2/sub/data.bin") == b"bytes"


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_file_that_an_exception_closes_is_not_saved(rope, mode):
    fs = filesystem(rope)
    for opened in (fs.open("1/a", mode), fsspec.open("ropeteam://1/a", mode, client=rope, timeout=WAIT_S)):
        with pytest.raises(ZeroDivisionError), opened as file:
            file.write(b"half" if mode == "wb" else "half")
            1 / 0  # noqa: B018
    file = fs.open("1/a", "wb")
    file.write(b"half")
    del file  # it was not closed
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with fs.open("1/a", mode) as file:  # saving inside an exception handler works
            file.write(b"whole" if mode == "wb" else "whole")
    assert dict(rope.load(1)) == {"a": b"whole"}


def test_the_files_of_a_transaction_are_one_shard(rope):
    fs = filesystem(rope)
    with pytest.raises(ZeroDivisionError), fs.transaction:
        fs.pipe("1/a", b"a")
        1 / 0  # noqa: B018
    assert not fs.exists("1")
    with pytest.raises(ropeteam.InvalidArgument, match="b is still open"), fs.transaction:
        fs.pipe("1/a", b"a")
        still = fs.open("1/b", "wb")
    still.close()
    assert not fs.exists("1/a")
    with fs.transaction:
        fs.pipe({"1/a": b"a", "2/x": b"x"})
        with fs.open("1/.tmp", "wb") as file:
            file.write(b"metadata")
        fs.pipe("1/gone", b"gone")
        assert fs.info("1/.tmp")["size"] == 8 and fs.find("1") == ["1/.tmp", "1/a", "1/gone"]
        fs.mv("1/.tmp", "1/.metadata")
        fs.rm("1/gone")
        assert fs.find("1") == ["1/.metadata", "1/a"]
    assert dict(rope.load(1)) == {"a": b"a", ".metadata": b"metadata"}
    assert dict(rope.load(2)) == {"x": b"x"}
    with pytest.raises(NotImplementedError):
        fs.mv("1/a", "1/b")


def test_bytes_go_into_the_arena_while_they_are_written(rope):
    fs = filesystem(rope)
    blocks = [payload(seed, 1 << 20) for seed in range(3)]
    tmp = payload(9, 3 << 20)
    with fs.transaction:
        small, large, beside, held = (fs.open(f"1/{name}", "wb") for name in ("small", "large", "beside", "held.tmp"))
        for file in (small, large, beside):
            for block in blocks:
                file.write(block[:10])
        large.write(blocks[0])  # now it streams, and the others must wait
        beside.write(blocks[1])
        for at in range(0, 1 << 20, 4096):
            large.write(blocks[2][at : at + 4096])
        assert [len(file.pieces) for file in (small, beside)] == [1, 2] and len(large.pieces) == 1
        large.close()
        beside.write(blocks[0])  # now it streams
        assert (beside.streamed, beside.pieces) == (True, [])
        held.write(tmp)
        for file in (small, beside, held):
            file.close()
        for path in ("1/large", "1/beside"):
            with pytest.raises(NotImplementedError):
                fs.rm(path)
            with pytest.raises(NotImplementedError):
                fs.mv(path, "1/other")
        fs.mv("1/held.tmp", "1/held")
    heads = b"".join(block[:10] for block in blocks)
    assert dict(rope.load(1)) == {
        "small": heads, "large": heads + blocks[0] + blocks[2], "beside": heads + blocks[1] + blocks[0], "held": tmp,
    }  # fmt: skip
    with pytest.raises(ropeteam.Aborted, match="step 2"), fs.transaction:
        with pytest.raises(ZeroDivisionError), fs.open("2/large", "wb") as file:
            file.write(blocks[0])
            1 / 0  # noqa: B018
    with pytest.raises(ropeteam.NoSpace), fs.open("2/large", "wb") as file:
        while True:
            file.write(blocks[0])
    fs.pipe("2/large", b"fits")
    assert dict(rope.load(2)) == {"large": b"fits"}


def test_without_a_client_the_process_s_own_is_taken(two):
    with pytest.raises(ropeteam.InvalidArgument, match="2 clients are open"):
        fsspec.filesystem("ropeteam", skip_instance_cache=True).ls("")
    two[0].close()
    fs = fsspec.filesystem("ropeteam", skip_instance_cache=True)
    assert fs.client is two[1] and fs.cat("5/model.pt") == payload(1, 5_000_001)


def test_torch_saves_and_loads(rope):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fs = filesystem(rope)
    state = {"w": torch.arange(300_000, dtype=torch.float32), "step": 3}
    with fs.open("ropeteam://3/state.pt", "wb") as file:
        torch.save(state, file)
    with fs.open("ropeteam://3/state.pt") as file:
        loaded = torch.load(file)
    with fs.local_path("ropeteam://3/state.pt") as path:
        mapped = torch.load(path, mmap=True)
    for each in (loaded, mapped):
        assert torch.equal(each["w"], state["w"]) and each["step"] == 3
    with pytest.raises(FileNotFoundError), fs.local_path("3/none"):
        pass


class Unpicklable:
    def __reduce__(self):
        raise ZeroDivisionError


def test_ropeteam_torch_save_writes_the_file_in_one_copy(rope):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.serialization import config

    import ropeteam.torch

    fs = filesystem(rope)
    weight = torch.randn(1000, 1000)
    state = {"w": weight, "tied": weight.T, "part": weight[5:7], "half": weight.bfloat16(), "none": None}
    expected = io.BytesIO()
    with config.patch("save.compute_crc32", False), fs.transaction:  # without CRCs all bytes are the same
        torch.save(state, expected)
        for name in ("1/first.pt", "1/behind.pt"):
            with fs.open(name, "wb") as file:
                if name == "1/behind.pt":
                    file.write(b"")
                ropeteam.torch.save(state, file)
                assert (file.streamed, file.pieces) == (True, []) and file.tell() > 6_000_000
        with fs.open("1/streaming", "wb") as first, fs.open("1/waits.pt", "wb") as file:
            first.write(bytes(1 << 20))
            ropeteam.torch.save(state, file)
            assert not file.streamed
        with fs.open("1/small.pt", "wb") as file:
            ropeteam.torch.save({"step": torch.tensor(3)}, file)
            assert not file.streamed
    for name in ("first", "behind", "waits"):
        assert fs.cat(f"ropeteam://1/{name}.pt") == expected.getvalue()
        with fs.local_path(f"1/{name}.pt") as path:
            loaded = torch.load(path, mmap=True, weights_only=True)
        assert all(torch.equal(loaded[key], state[key]) for key in ("w", "tied", "part", "half"))
        assert loaded["tied"].untyped_storage().data_ptr() == loaded["w"].untyped_storage().data_ptr()
    with fs.open("1/small.pt") as file:
        assert torch.load(file) == {"step": torch.tensor(3)}


def test_ropeteam_torch_save_leaves_the_rest_to_torch(rope, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import ropeteam.torch

    fs = filesystem(rope)
    rows = [torch.ones(2), torch.zeros(3)]
    for file in (fs.open("1/nested.pt", "wb"), open(tmp_path / "nested.pt", "wb"), io.BytesIO()):
        with warnings.catch_warnings(), file:
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            ropeteam.torch.save(torch.nested.nested_tensor(rows), file)
    for file in (fs.open("1/nested.pt"), open(tmp_path / "nested.pt", "rb")):
        with file:
            loaded = torch.load(file, weights_only=True)
        assert all(map(torch.equal, loaded.unbind(), rows))
    for step, error, state in (
        (2, ZeroDivisionError, [torch.ones(1 << 20), Unpicklable()]),
        (3, ropeteam.InvalidArgument, torch.ones(32 << 20)),
    ):
        with pytest.raises(error), fs.open(f"{step}/half.pt", "wb") as file:
            ropeteam.torch.save(state, file)
        assert not fs.exists(str(step))
        fs.pipe(f"{step}/whole", b"whole")


def test_safetensors_saves_and_loads(rope):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    fs = filesystem(rope)
    weight = torch.randn(100, 7)
    fs.pipe("1/model.safetensors", safetensors_torch.save({"w": weight}))
    assert torch.equal(safetensors_torch.load(fs.cat("1/model.safetensors"))["w"], weight)
    with fs.local_path("1/model.safetensors") as path, safetensors.safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), weight)


def test_pandas_saves_and_loads(rope):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"loss": [0.5, 0.25], "step": [1, 2]})
    options = {"client": rope}
    frame.to_csv("ropeteam://1/log.csv", index=False, storage_options=options)
    assert pandas.read_csv("ropeteam://1/log.csv", storage_options=options).equals(frame)
    frame.to_pickle("ropeteam://2/log.pkl.gz", storage_options=options)
    assert pandas.read_pickle("ropeteam://2/log.pkl.gz", storage_options=options).equals(frame)


def test_dcp_s_own_fsspec_writer_and_reader(rope, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    fs = filesystem(rope)
    state = {"w": torch.randn(1000, 70), "nested": {"step": 4, "b": torch.arange(5)}}

    def fresh():
        return {"w": torch.zeros(1000, 70), "nested": {"step": 0, "b": torch.zeros(5, dtype=torch.int64)}}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        with fs.transaction:
            writer = FsspecWriter("ropeteam://4", sync_files=False, thread_count=2, client=rope, timeout=WAIT_S)
            dcp.save(state, storage_writer=writer, no_dist=True)
        assert fs.ls("4", detail=False) == ["4/.metadata", "4/__0_0.distcp", "4/__0_1.distcp"]
        rope.wait(4, Level.COMMITTED)
        ropeteam.export(4, tmp_path, socket=rope.socket)
        (exported,) = tmp_path.glob("*/step-*")
        readers = [FsspecReader("ropeteam://4", client=rope, timeout=WAIT_S), FileSystemReader(exported)]
        for reader in readers:
            loaded = fresh()
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert torch.equal(loaded["w"], state["w"]) and loaded["nested"]["step"] == 4
            assert torch.equal(loaded["nested"]["b"], state["nested"]["b"])
