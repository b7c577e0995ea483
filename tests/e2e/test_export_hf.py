# SPDX-License-Identifier: Apache-2.0
"""ropeteam export --format hf: exports a step's model as whole tensors, from memory and from storage.
tests/frameworks tests that from_pretrained opens the result."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest
from harness import WAIT_S, ask
from ropeteam import Level
from test_storage_cli import flip, refused, snapshot, well
from test_torch_state import run

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402
import torch_worlds  # noqa: E402
from ropeteam.torch._plain import flatten  # noqa: E402

load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file


def save(nodes, step: int, *ranks: dict, level: Level = Level.COMMITTED) -> None:
    """Starts a world that saves one step; `ranks`: the objects of each rank."""
    ropes = [nodes[rank % nodes.size].open(rank, len(ranks), f"saves {step}") for rank in range(len(ranks))]
    for rope, objects in zip(ropes, ranks):
        rt.save_tensors(rope, step, objects, persist=level == Level.PERSISTED)
    for rope in ropes:
        rope.wait(step, level, WAIT_S)
        rope.close()


def part(whole, *slices: slice):
    starts = [each.start or 0 for each in slices]
    return rt.Piece(whole[slices], whole.shape, starts)


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_sharded_and_replicated_models_are_exported_whole(cluster, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "net"}')
    nodes = cluster(2, options=["--storage", str(store)])
    run(torch_worlds.exported, 4, nodes, tmp_path)
    given = ["--format", "hf", "--config", str(tmp_path / "config.json")]
    for step in (1, 2, 3):
        to = tmp_path / f"out-{step}"
        said = well("export", str(step), str(to), *given, "--storage", str(store))
        assert "tied, written once: head.weight (= embed.weight)" in said
        whole = torch.load(tmp_path / f"whole-{step}")
        assert torch.equal(whole.pop("head.weight"), whole["embed.weight"])
        same(load_file(to / "model.safetensors"), whole)
        assert json.loads((to / "config.json").read_text()) == {"model_type": "net"}
    well("export", "latest", str(tmp_path / "memory"), *given, "--socket", nodes[1].socket)
    assert snapshot(tmp_path / "memory") == snapshot(tmp_path / "out-3")


def test_parts_of_every_kind_come_together(cluster, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    nodes = cluster(2, memory="256M", options=["--storage", str(store)])
    torch.manual_seed(3)
    large = torch.randn(3000, 2001)  # its columns are on two ranks: many runs, over several blocks
    rows, cube = torch.randn(10, 6).bfloat16(), torch.randint(0, 99, (4, 5, 6))
    small = {
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).half(),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    first = {f"model/{name}": tensor for name, tensor in small.items()}
    first["model/large"] = part(large, slice(0, 3000), slice(0, 1000))
    first["model/rows#0"] = part(rows, slice(0, 3), slice(0, 6))
    first["model/rows#1"] = part(rows, slice(7, 10), slice(0, 6))
    first["model/cube"] = part(cube, slice(1, 4), slice(0, 5), slice(2, 6))
    files = {"config.json": b'{"a": 1}', "vocab.txt": b"one\ntwo\n", "more/template.jinja": b"{{ x }}"}
    first.update({f"hf/{name}": data for name, data in files.items()})
    first["optimizer/large"] = torch.randn(100, 100)
    second = {
        "model/large": part(large, slice(0, 3000), slice(1000, 2001)),
        "model/rows": part(rows, slice(3, 7), slice(0, 6)),
        "model/cube#0": part(cube, slice(0, 1), slice(0, 5), slice(0, 6)),
        "model/cube#1": part(cube, slice(1, 4), slice(0, 5), slice(0, 2)),
        "hf/config.json": b"not rank 0's",
    }
    save(nodes, 5, first, second, level=Level.PERSISTED)
    expected = {**small, "large": large, "rows": rows, "cube": cube}
    one, stored, split = (tmp_path / name for name in ("one", "stored", "split"))
    said = well("export", "5", str(one), "--format", "hf", "--socket", nodes[0].socket)
    assert "of job test: 8 tensors, 22.9 MiB, in 1 file, and 3 small files are in " in said
    same(load_file(one / "model.safetensors"), expected)
    assert {name: (one / name).read_bytes() for name in files} == files
    assert len(snapshot(one)) == 4
    well("export", "5", str(stored), "--format", "hf", "--storage", str(store))
    assert snapshot(stored) == snapshot(one)

    well("export", "5", str(split), "--format", "hf", "--socket", nodes[1].socket, "--max-shard-size", "1KB")
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    assert sorted(path.name for path in split.glob("*.safetensors")) == names and len(names) > 2
    found = {}
    for name in names:
        of_file = load_file(split / name)
        assert all(index["weight_map"][each] == name for each in of_file)
        assert len(of_file) == 1 or sum(each.nbytes for each in of_file.values()) <= 1000
        found.update(of_file)
    same(found, expected)

    # A damaged file is found before any output file has its name.
    (rank_file,) = store.glob("test/step-*/rank-00001.safetensors")
    flip(rank_file, rank_file.stat().st_size // 2)
    done = ask("export", "5", str(tmp_path / "damaged"), "--format", "hf", "--storage", str(store))
    assert done.returncode == 1 and "corrupt: " in done.stderr and "rank-00001.safetensors" in done.stderr
    assert snapshot(tmp_path / "damaged") == {}


def test_an_export_reads_no_more_than_the_model_from_other_nodes(cluster, tmp_path):
    nodes = cluster(3, memory="64M", options=["--replicas", "1"])
    model = torch.randn(1 << 20)
    save(nodes, 1, {"model/w": model, "optimizer/w": torch.randn(4 << 20), "hf/config.json": b"{}"}, {})
    brought = []
    for node in nodes.nodes:
        before = node.local_status()["counters"]["fetch_bytes"]
        out = tmp_path / f"out-{len(brought)}"
        well("export", "1", str(out), "--format", "hf", "--socket", node.socket)
        brought.append(node.local_status()["counters"]["fetch_bytes"] - before)
        same(load_file(out / "model.safetensors"), {"w": model})
    # Two nodes have the shard. The third one reads it, and from one a few small objects.
    most, *others = sorted(brought, reverse=True)
    assert model.nbytes <= most <= 1.1 * model.nbytes and max(others) < 100_000, brought


def test_what_cannot_be_exported_is_said(cluster, tmp_path):
    nodes = cluster(1)
    out = tmp_path / "out"
    hf = [str(out), "--format", "hf", "--socket", nodes[0].socket]
    whole = torch.randn(8, 3)
    config = {"hf/config.json": b"{}"}

    def says(text: str, *options: str, code: int = 1) -> None:
        assert text in refused("export", "latest", *hf, *options, code=code)
        assert not out.exists() or snapshot(out) == {}

    save(nodes, 1, {**config, "model/w": part(whole, slice(0, 2), slice(0, 3))}, {"other": b""})
    says("w of shape [8, 3] has a hole: no rank saved what begins at [2, 0], of size [6, 3]")
    save(nodes, 2, {**config, "model/w": whole}, {"model/w": whole.half()})
    says("w: rank 0 saved F32 of shape [8, 3], rank 1 F16 of shape [8, 3]")
    save(nodes, 3, {**config, "weights": whole})
    says("has no model: no rank saved a tensor whose name begins with model/")
    save(nodes, 4, {".metadata": b"x", "__0_0.distcp": b"y"})
    says("saved by torch.distributed.checkpoint: export it without --format")
    says("format_utils dcp_to_torch")
    save(nodes, 5, {"model/actor.w": whole, "model/critic.w": 2 * whole})
    says("give --config FILE")
    given = tmp_path / "given"
    given.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "x.bin"):
        (given / name).write_text("{}")
    says("there is no model judge: names of the step's models begin with actor, critic", "--model", "judge")
    says("no-such: No such file", "--config", str(tmp_path / "no-such"))
    says("--max-shard-size", "--max-shard-size", "5 apples", code=2)
    says('--format "pt" is not hf', "--format", "pt", code=2)
    assert "go with --format hf" in refused("export", "5", str(out), "--model", "actor", code=2)
    assert "not s3://b" in refused("export", "5", "s3://b", "--format", "hf", code=2)

    out.mkdir(exist_ok=True)
    (out / "model.safetensors.ropeteam-partial").write_text("of an export that was cut off")
    well("export", "5", *hf, "--model", "critic", "--config", str(given))
    assert sorted(snapshot(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    same(load_file(out / "model.safetensors"), {"w": 2 * whole})
    before = snapshot(out)
    assert f"{out} is not empty: it has " in refused("export", "5", *hf, "--config", str(given))
    assert snapshot(out) == before


def test_the_best_weights_are_those_that_a_trainer_has_kept(cluster, tmp_path):
    nodes = cluster(1)
    last, best, config = torch.randn(3), torch.randn(3), {"hf/config.json": b"{}", "model/w": torch.zeros(3)}
    hf = ["--format", "hf", "--socket", nodes[0].socket, "--best"]

    def kept(step: int, **extra) -> dict:
        tensors, data = flatten({"extra": {"best_mesh": [], **extra}})
        return {**config, "model/w": last, "data": data, **{f"data/{name}": each for name, each in tensors.items()}}

    save(nodes, 1, kept(1, best_step=1, best=None))
    assert "the best weights are those of step 1\n" in well("export", "1", str(tmp_path / "one"), *hf)
    same(load_file(tmp_path / "one" / "model.safetensors"), {"w": last})
    save(nodes, 2, kept(2, best_step=1, best={"w": best}))
    assert "the best weights are those of step 1\n" in well("export", "2", str(tmp_path / "two"), *hf)
    same(load_file(tmp_path / "two" / "model.safetensors"), {"w": best})
    save(nodes, 3, kept(3, best_step=1, best={"w": best}, best_mesh=[2]))
    assert "fit only their mesh: export step 1" in refused("export", "3", str(tmp_path / "three"), *hf)
    save(nodes, 4, config)
    assert "has no best weights" in refused("export", "4", str(tmp_path / "three"), *hf)


def test_a_full_disk_leaves_nothing(cluster, tmp_path):
    out = tmp_path / "small"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(out)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        nodes = cluster(1)
        save(nodes, 1, {"model/w": torch.randn(1 << 20), "hf/config.json": b"{}"})
        error = refused("export", "1", str(out), "--format", "hf", "--socket", nodes[0].socket)
        assert "no space: reserve 4.0 MiB for" in error and "model.safetensors" in error
        assert snapshot(pathlib.Path(out)) == {}
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True, timeout=WAIT_S)
