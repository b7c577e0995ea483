# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an attacker, loaded by the real DeepSpeed's and Megatron-Core's classes."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import types

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "security"))

from attack_files import View, saved, with_pickle  # noqa: E402
from ropeteam import Unsupported  # noqa: E402
from ropeteam.torch._pt import DEEPSPEED, MEGATRON, load_pt  # noqa: E402
from ropeteam.torch._unpickle import weights  # noqa: E402


def code(path: pathlib.Path) -> bytes:
    """A file of torch.save that empties another one."""
    body = f"c_io\nFileIO\n(X{chr(len(str(path)))}\0\0\0{path}X\1\0\0\0wtR."
    return with_pickle(b"\x80\2" + body.encode())


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("state")
    yield path
    assert path.read_text() == "state"


def test_deepspeeds_engine_refuses_code(precious):
    pytest.importorskip("deepspeed")
    from ropeteam.deepspeed import RopeteamCheckpointEngine

    engine = object.__new__(RopeteamCheckpointEngine)
    view = View({"a.pt": code(precious)})
    engine._loading = types.SimpleNamespace(view=lambda rank: view, own=None, step=1)
    engine._owners, engine._loaded = {"a.pt": 0}, {}
    with pytest.raises(Unsupported, match="_io.FileIO"):
        engine.load("a.pt")


def test_megatrons_common_file_with_code_is_not_written(precious, tmp_path, monkeypatch):
    pytest.importorskip("megatron.core")
    import ropeteam.megatron as rm

    monkeypatch.setattr(rm.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(rm.dist, "broadcast_object_list", lambda *arguments, **options: None)
    files = {"common.pt": code(precious)}
    rope = types.SimpleNamespace(
        latest=lambda timeout: types.SimpleNamespace(step=7), view=lambda *arguments: View(files)
    )
    with pytest.raises(Unsupported, match="_io.FileIO"):
        rm.restore(rope, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    files["common.pt"] = saved({"iteration": 7})
    written = pathlib.Path(rm.restore(rope, tmp_path / "out")) / "common.pt"
    assert load_pt(memoryview(written.read_bytes())) == {"iteration": 7}


@pytest.mark.parametrize("library, names", [("deepspeed", DEEPSPEED), ("megatron.core", MEGATRON)])
def test_the_listed_classes_exist(library, names):
    pytest.importorskip(library)
    table = weights(names)
    assert [each for each in names if each.startswith(library.split(".")[0]) and each not in table] == []
    for each in names:
        if each in table:
            assert f"{table[each].__module__}.{table[each].__qualname__}" == each
            with contextlib.suppress(TypeError, ValueError):  # some need arguments
                made = table[each]()
                assert type(load_pt(memoryview(saved(made)), names)) is type(made)
