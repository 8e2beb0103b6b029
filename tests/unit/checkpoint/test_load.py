"""Nothing that is read from a checkpoint can run code."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex

from torchtitan_cp.checkpoint.load import CheckpointPlanner, read_table
from torchtitan_cp.checkpoint.manifest import Manifest
from torchtitan_cp.config import ConfigError

NO_FILES = Manifest(1, False, {})


class Evil:
    """Unpickled by pickle itself, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_the_pickle_of_this_test_does_run_code_in_an_ordinary_unpickler(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "hit")))
    assert (tmp_path / "hit").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_a_table_of_tensors_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path, nested: bool) -> None:
    evil: Any = Evil(tmp_path / "hit")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=evil) if nested else evil))
    with pytest.raises(ConfigError, match=r"\.metadata is refused: it refers to posix\.mkdir, which a checkpoint"):
        read_table(tmp_path, NO_FILES)
    assert not (tmp_path / "hit").exists()


class Attribute:
    """Unpickled as an attribute of a class."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_members_of_enums_are_read_as_python_3_11_0_to_3_11_3_write_them_and_no_other_attributes(
    tmp_path: Path,
) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, Attribute(type(member), member.name), {})))
    assert read_table(tmp_path, NO_FILES).planner_data is member
    for owner, name in ((type(member), "__reduce__"), (Metadata, "__init__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=Attribute(owner, name))))
        with pytest.raises(ConfigError, match=rf"\.metadata is refused: it refers to {name} of <"):
            read_table(tmp_path, NO_FILES)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1])])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=r"\.metadata is refused"):
        read_table(tmp_path, NO_FILES)


def test_a_number_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    planner = CheckpointPlanner()
    planner.set_up_planner({"lr": 0.1}, Metadata({}), True)
    item: Any = type("Item", (), {"dest_index": type("Index", (), {"fqn": "lr"})})
    good, evil = io.BytesIO(), io.BytesIO()
    torch.save(0.5, good)
    torch.save(Evil(tmp_path / "hit"), evil)
    good.seek(0)
    planner.load_bytes(item, good)
    assert planner.original_state_dict["lr"] == 0.5
    evil.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        planner.load_bytes(item, evil)
    assert not (tmp_path / "hit").exists()


def test_a_table_that_names_files_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    table = Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("../../secret", 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(ConfigError, match=r"is refused: it names \.\./\.\./secret"):
        read_table(tmp_path, Manifest(1, False, {"__0_0.distcp": {"bytes": 1, "sha256": ""}}))
