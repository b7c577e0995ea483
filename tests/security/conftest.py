# SPDX-License-Identifier: Apache-2.0
"""The readers of checkpoints. The tests run without DeepSpeed and Megatron-Core: `read` uses the lists of
classes that ropeteam.deepspeed and ropeteam.megatron give to the reader."""

from __future__ import annotations

import pathlib
import pickle
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "api" / "python"))

torch = pytest.importorskip("torch")

from attack_files import dcp_files, dcp_load, read_metadata, with_pickle  # noqa: E402
from ropeteam.torch._pt import DEEPSPEED, MEGATRON, load_pt  # noqa: E402


@pytest.fixture
def read_value(tmp_path):
    """Loads a state whose value "x" was replaced by this file of torch.save."""

    def read(file: bytes, **options):
        files = dcp_files({"x": "a" * 8192, "w": torch.ones(2)}, tmp_path / "dcp")
        own = files["__0_0.distcp"]
        metadata = read_metadata(files[".metadata"])
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "x")
        assert len(file) < info.length, "the old value must be longer than the new one"
        # The end of a zip has to be the end of the value.
        where, info.length = info.offset, len(file)
        files["__0_0.distcp"] = own[:where] + file + own[where + len(file) :]
        files[".metadata"] = pickle.dumps(metadata)
        return dcp_load(files, {"x": None, "w": torch.zeros(2)}, **options)["x"]

    return read


@pytest.fixture(params=["deepspeed", "megatron", "metadata", "value"])
def read(request, read_value):
    """read(pickled) gives the pickle to one of the readers; read.kind says which."""

    def run(pickled: bytes):
        if request.param == "metadata":
            return read_metadata(pickled)
        file = with_pickle(pickled)
        if request.param == "value":
            return read_value(file)
        return load_pt(memoryview(file), DEEPSPEED if request.param == "deepspeed" else MEGATRON)

    run.kind = request.param
    return run
