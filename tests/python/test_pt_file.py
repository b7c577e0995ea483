# SPDX-License-Identifier: Apache-2.0
"""torch.save's file of any object, as pieces around the tensors' own memory."""

from __future__ import annotations

import argparse
import collections
import gc
import io
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.utils.serialization import config  # noqa: E402

from ropeteam import Unsupported  # noqa: E402
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


def everything():
    """A state with all kinds of tensors."""
    base = torch.arange(24.0)
    return {
        **state(),
        "dtypes": [torch.ones(6, dtype=each) for each in (torch.float8_e4m3fn, torch.half, torch.bool)],
        "complex": torch.complex(base, -base),
        "conjugate": torch.complex(base, -base).conj(),
        "negative": torch.complex(base, -base).conj().imag,
        "views": [base[1::2], base.reshape(4, 6)[:, 1:3], base.expand(2, 24)],
        "sparse": torch.eye(3).to_sparse(),
        "meta": {"numbers": (1, 2.5, None, True), "size": torch.Size([2]), "dtype": torch.bfloat16},
        "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    }


def test_the_file_is_torch_save_s_but_for_the_crc32_of_the_data():
    buffer = io.BytesIO()
    with config.patch("save.compute_crc32", False):
        torch.save(everything(), buffer)
        assert joined(pt_file(everything())) == buffer.getvalue()


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


class Odd(torch.Tensor):
    """A subclass of Tensor: its pickle contains its type and attributes, and refers to a storage."""


def test_storages_of_whatever_has_them_are_not_copied():
    raw, odd = torch.arange(4, dtype=torch.uint8), torch.ones(8).as_subclass(Odd)
    odd.note = "kept"
    made = pt_file({"storage": raw.untyped_storage(), "odd": odd, "again": raw[1:]})
    tensors = [part.data_ptr() for part in made if not isinstance(part, bytes)]
    assert tensors == [raw.data_ptr(), odd.data_ptr()]
    loaded = torch.load(io.BytesIO(joined(made)), weights_only=False)
    assert type(loaded["odd"]) is Odd and loaded["odd"].note == "kept" and bool((loaded["odd"] == 1).all())
    assert loaded["storage"]._untyped_storage.data_ptr() == loaded["again"].untyped_storage().data_ptr()
    assert torch.equal(loaded["again"], raw[1:])


def test_tensors_are_not_kept_by_what_was_made_for_the_pickle():
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(1000)
    alive = weakref.ref(array)
    gc.disable()  # the garbage collector could free it
    try:
        parts = pt_file({"tensor": torch.from_numpy(array)})
        del array
        assert alive() is not None
        del parts
        assert alive() is None
    finally:
        gc.enable()


def test_only_the_named_classes_are_loaded():
    names: set[str] = set()
    file = joined(pt_file({"options": argparse.Namespace(a=1), "x": torch.ones(2)}, names.update))
    assert "argparse.Namespace" in names
    assert load_pt(memoryview(file), ("argparse.Namespace",))["options"].a == 1
    with pytest.raises(Unsupported, match="argparse.Namespace"):
        load_pt(memoryview(file))
