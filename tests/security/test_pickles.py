# SPDX-License-Identifier: Apache-2.0
"""Pickles in checkpoints that would run code, and what each reader of a checkpoint does with them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys

import numpy
import pytest
import torch
from attack_files import read_metadata, saved, with_pickle
from ropeteam import Corrupt, RopeteamError, Unsupported
from ropeteam.torch._pt import DEEPSPEED, MEGATRON, load_pt
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- a small assembler


def value(plain) -> bytes:
    return pickle.dumps(plain, 2)[2:-1]


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def new_name(module: str, attribute: str) -> bytes:
    """As protocol 4 has it: the attribute may be a path, "a.b"."""
    texts = [pickle.BINUNICODE + len(t).to_bytes(4, "little") + t.encode() for t in (module, attribute)]
    return texts[0] + texts[1] + pickle.STACK_GLOBAL


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def build(made: bytes, state: bytes) -> bytes:
    return made + state + b"b"


def then(*bodies: bytes) -> bytes:
    """One after the other, as a list."""
    return b"](" + b"".join(bodies) + b"e"


def program(body: bytes, protocol: int = 2) -> bytes:
    return pickle.PROTO + bytes([protocol]) + body + b"."


# ---- the attacks: each writes the file `ran`


def by_type(function: bytes, *arguments: bytes) -> bytes:
    """torch's function for subclasses of Tensor calls any function that the pickle gives to it."""
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    return call(rebuild, function, name("torch", "Tensor"), b"(" + b"".join(arguments) + b"t", b"N")


def module(of: str) -> bytes:
    return call(name("importlib", "import_module"), value(of))


def encoded(data: bytes) -> bytes:
    """How protocol 2 has bytes."""
    return call(name("_codecs", "encode"), value(data.decode("latin1")), value("latin1"))


def touch(ran: str) -> bytes:
    return value(f"touch {ran}")


def python(ran: str) -> bytes:
    return value(f"open({ran!r}, 'w')")


ATTACKS = {
    "os.system": lambda ran: call(name("os", "system"), touch(ran)),
    "posix.system": lambda ran: call(name("posix", "system"), touch(ran)),
    "eval": lambda ran: call(name("builtins", "eval"), python(ran)),
    "eval by Python 2's name": lambda ran: call(name("__builtin__", "eval"), python(ran)),
    "subprocess": lambda ran: call(name("subprocess", "check_call"), value(["touch", ran])),
    "numpy.testing": lambda ran: call(
        name("numpy.testing._private.utils", "runstring"), python(ran), value({})
    ),
    "_io.FileIO": lambda ran: call(name("_io", "FileIO"), value(ran), value("w")),
    "_io.open": lambda ran: call(name("_io", "open"), value(ran), value("w")),
    "argparse.FileType": lambda ran: call(call(name("argparse", "FileType"), value("w")), value(ran)),
    "argparse.FileType by a tensor's type": lambda ran: by_type(
        call(name("argparse", "FileType"), value("w")), value(ran)
    ),
    "argparse's os": lambda ran: call(new_name("argparse", "_os.system"), touch(ran)),
    "functools.partial": lambda ran: call(
        call(name("functools", "partial"), name("os", "system"), touch(ran))
    ),
    "operator.attrgetter": lambda ran: call(
        call(call(name("operator", "attrgetter"), value("system")), module("os")), touch(ran)
    ),
    "operator.methodcaller": lambda ran: call(
        call(name("operator", "methodcaller"), value("system"), touch(ran)), module("os")
    ),
    "getattr": lambda ran: call(
        call(name("builtins", "getattr"), module("os"), value("system")), touch(ran)
    ),
    "importlib": lambda ran: module("planted"),
    "a class of the attacker's module": lambda ran: name("planted", "Anything"),
    "torch.hub": lambda ran: call(
        name("torch.hub", "_import_module" if hasattr(torch.hub, "_import_module") else "import_module"),
        value("hubconf"),
        value(os.path.join(os.path.dirname(ran), "planted.py")),
    ),
    "a pickle in a pickle": lambda ran: call(
        name("_pickle", "loads"), encoded(program(call(name("os", "system"), touch(ran))))
    ),
    "torch._utils": lambda ran: call(
        call(name("torch._utils", "_import_dotted_name"), value("os.system")), touch(ran)
    ),
    "a path of attributes": lambda ran: call(new_name("torch.serialization", "os.system"), touch(ran)),
    "a longer path of attributes": lambda ran: call(new_name("torch", "serialization.os.system"), touch(ran)),
    "a path of attributes in numpy": lambda ran: call(
        new_name("numpy", "testing._private.utils.runstring"), python(ran), value({})
    ),
    "a tensor's type that is a function": lambda ran: by_type(name("os", "system"), touch(ran)),
    "opcode INST": lambda ran: b"(" + touch(ran) + b"ios\nsystem\n",
    "opcode OBJ": lambda ran: b"(" + name("os", "system") + touch(ran) + b"o",
    "after good values": lambda ran: then(
        call(name("collections", "OrderedDict")), call(name("os", "system"), touch(ran))
    ),
}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A path that exists after an attack has succeeded."""
    path = tmp_path / "ran"
    (tmp_path / "planted.py").write_text(f"open({str(path)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("planted", None)


def refusal(call) -> str:
    """The text of the error, which is one of the package's."""
    with pytest.raises((RopeteamError, CheckpointException)) as caught:
        call()
    error = caught.value
    if isinstance(error, CheckpointException):  # dcp.load has one error for each rank
        (failure,) = error.failures.values()
        error = failure[0]
    assert isinstance(error, (Unsupported, Corrupt)), error
    return str(error)


def test_good_values_are_loaded(read):
    good = then(value({"a": [1, "b", (2.5, None)]}), call(name("torch", "Size"), value((2, 3))))
    if read.kind != "metadata":
        assert read(program(good)) == [{"a": [1, "b", (2.5, None)]}, torch.Size([2, 3])]
        return
    storage = {MetadataIndex("a", (0, 1)): _StorageInfo("f", 1, 2)}
    metadata = Metadata({}, {"a": (1, "b")}, storage, StorageMeta())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert read(pickle.dumps(metadata, protocol)).storage_data == metadata.storage_data


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_runs(read, ran, attack):
    before = set(sys.modules)
    protocol = 4 if "path" in attack or "argparse's" in attack else 2
    refusal(lambda: read(program(ATTACKS[attack](str(ran)), protocol)))
    assert not ran.exists()
    assert "planted" not in set(sys.modules) - before


def test_no_module_is_imported_by_its_name_in_a_file(read):
    sys.modules.pop("numpy.f2py.diagnose", None)
    refusal(lambda: read(program(name("numpy.f2py.diagnose", "run"))))
    assert "numpy.f2py.diagnose" not in sys.modules


def test_a_file_is_not_emptied(read, tmp_path):
    path = tmp_path / "precious"
    path.write_text("state")
    refusal(lambda: read(program(call(name("_io", "FileIO"), value(str(path)), value("w")))))
    assert path.read_text() == "state"


def test_the_error_names_the_class_and_what_would_allow_it(read):
    text = refusal(lambda: read(program(call(name("operator", "attrgetter"), value("x")))))
    assert "operator.attrgetter" in text
    allows = "unsafe_pickle=True" if read.kind in ("metadata", "value") else "add_safe_globals"
    assert allows in text


def test_unsafe_pickle_allows_everything(read_value, ran):
    assert read_value(saved(numpy.random.default_rng(1)), unsafe_pickle=True).random() >= 0
    metadata = Metadata({}, planner_data=numpy.float32)
    refusal(lambda: read_metadata(pickle.dumps(metadata)))
    assert read_metadata(pickle.dumps(metadata), unsafe_pickle=True).planner_data is numpy.float32
    attack = program(ATTACKS["os.system"](str(ran)))
    read_value(with_pickle(attack), unsafe_pickle=True)
    assert ran.exists()


# ---- numpy: with a forged dtype the bytes of an array are pointers to objects


def forged(core: str) -> bytes:
    inner = call(name("numpy", "dtype"), value("O8"), value(False), value(True))
    whole = build(
        call(name("numpy", "dtype"), value("V8"), value(False), value(True)),
        b"(" + value(3) + value("|") + b"N" + value(("a",))
        + b"}" + value("a") + b"(" + inner + value(0) + b"ts" + value(8) + value(1) + value(0) + b"t",
    )
    data = encoded(struct.pack("Q", id(Metadata)))
    empty = call(
        name(f"{core}.multiarray", "_reconstruct"), name("numpy", "ndarray"), value((0,)), value(b"b")
    )
    return build(empty, b"(" + value(1) + value((1,)) + whole + value(False) + data + b"t")


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
@pytest.mark.parametrize("registered", [False, True])
def test_a_dtype_cannot_declare_bytes_to_be_objects(read, core, registered):
    kinds = [numpy.dtype, numpy.ndarray, numpy._core.multiarray._reconstruct, numpy.dtypes.VoidDType]
    kinds.append(numpy.dtypes.ObjectDType)
    with torch.serialization.safe_globals(kinds if registered else []):  # Megatron-Core does so
        refusal(lambda: read(program(forged(core))))


@pytest.mark.parametrize(
    "function",
    [
        name("numpy", "ndarray"),
        name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"0",
        name("numpy._core.multiarray", "scalar"),
        name("numpy.dtypes", "VoidDType"),
    ],
)
def test_numpys_functions_take_only_what_numpy_writes(read, function):
    objects = call(name("numpy", "dtype"), value("O8"), value(False), value(True))
    data = encoded(b"\x01" * 8)
    refusal(lambda: read(program(call(function, value((1,)), value("O"), data))))
    refusal(lambda: read(program(call(function, objects, data))))


def test_a_text_is_encoded_by_latin1_alone(read):
    refusal(lambda: read(program(call(name("_codecs", "encode"), value("x"), value("rot13")))))


# ---- classes and shared objects stay as they are


@pytest.mark.parametrize(
    "target",
    [
        name("torch.distributed.checkpoint.metadata", "TensorProperties"),
        name("argparse", "Namespace"),
        name("collections", "OrderedDict"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch.serialization", "_get_layout"),
        name("torch", "float32"),
        call(name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), value(0)),
    ],
)
def test_no_pickle_changes_a_class_or_a_function(read, target):
    mark = value({"marked_by_a_pickle": 1})
    refusal(lambda: read(program(build(target, mark))))
    refusal(lambda: read(program(build(target, b"N" + mark + b"\x86"))))
    assert not hasattr(TensorProperties, "marked_by_a_pickle")
    assert not hasattr(TensorProperties().memory_format, "marked_by_a_pickle")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "marked_by_a_pickle")


@pytest.mark.parametrize("attribute", ["__class__", "__reduce_ex__", "__dict__"])
def test_no_pickle_sets_an_attribute_that_python_calls(read, attribute):
    for made in (call(name("collections", "OrderedDict")), call(name("argparse", "Namespace"))):
        refusal(lambda made=made: read(program(build(made, value({attribute: None})))))
        refusal(lambda made=made: read(program(build(made, b"N" + value({attribute: None}) + b"\x86"))))


def test_only_lists_and_dicts_get_items(read):
    storage = call(name("torch", "Tensor"), value(1))
    refusal(lambda: read(program(storage + value(0) + value(1) + b"s")))
    refusal(lambda: read(program(storage + b"(" + value(0) + value(1) + b"u")))
    refusal(lambda: read(program(call(name("builtins", "bytearray")) + value(1) + b"a")))
    refusal(lambda: read(program(call(name("builtins", "bytearray")) + b"(" + value(1) + b"e")))


def test_an_archive_of_code_is_not_run():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), buffer)
    refusal(lambda: load_pt(memoryview(buffer.getvalue()), DEEPSPEED))


@pytest.mark.parametrize("file", [b"", b"PK", pickle.dumps({}), pickle.dumps({}, 2)])
def test_what_is_no_file_of_torch_save_is_corrupt(file):
    with pytest.raises(Corrupt):
        load_pt(memoryview(file), MEGATRON)
