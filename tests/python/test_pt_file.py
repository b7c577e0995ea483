# SPDX-License-Identifier: Apache-2.0
"""torch.save's file of any object, as pieces around the tensors' own memory."""

from __future__ import annotations

import argparse
import collections
import io

import pytest

torch = pytest.importorskip("torch")

from ropeteam.torch._pt import load_pt, pt_file  # noqa: E402


def joined(parts) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.numpy().tobytes() for part in parts)


def state():
    base = torch.arange(12.0)
    tied = torch.nn.Parameter(torch.ones(3))
    return collections.OrderedDict(
        weight=base.reshape(3, 4).T,
        part=base[2:5],
        tied=[tied, tied],
        none=torch.empty(0, 4),
        scalar=torch.tensor(7),
        half=torch.ones(5, dtype=torch.bfloat16),
        mixed={"step": 3, (1, 2): "x"},
    )


def test_it_is_the_file_that_torch_loads():
    made = pt_file(state())
    loaded = torch.load(io.BytesIO(joined(made)), weights_only=True)
    for name, value in state().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name], value) and loaded[name].stride() == value.stride()
            assert loaded[name].dtype == value.dtype
    assert loaded["mixed"] == state()["mixed"]
    assert loaded["tied"][0] is loaded["tied"][1] and isinstance(loaded["tied"][0], torch.nn.Parameter)
    assert loaded["part"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()


def test_no_tensor_is_copied_and_each_storage_is_there_once():
    tensor = torch.zeros(1000)
    tensors = [part for part in pt_file([tensor, tensor[1:], tensor]) if not isinstance(part, bytes)]
    assert [part.data_ptr() for part in tensors] == [tensor.data_ptr()]
    tensor[0] = 5.0
    assert torch.load(io.BytesIO(joined(pt_file([tensor]))))[0][0] == 5.0


def test_a_storage_without_a_tensor_is_written_by_torch_itself():
    made = pt_file({"storage": torch.arange(4.0).untyped_storage(), "tensor": torch.ones(2)})
    assert all(isinstance(part, bytes) for part in made)
    loaded = torch.load(io.BytesIO(joined(made)), weights_only=False)
    assert "storage" in loaded and torch.equal(loaded["tensor"], torch.ones(2))


def test_only_the_classes_of_named_packages_are_loaded():
    names: set[str] = set()
    file = joined(pt_file({"options": argparse.Namespace(a=1), "x": torch.ones(2)}, names.update))
    assert "argparse.Namespace" in names
    assert load_pt(memoryview(file), ("argparse",))["options"].a == 1
    with pytest.raises(Exception, match="argparse.Namespace"):
        load_pt(memoryview(file), ("numpy",))
