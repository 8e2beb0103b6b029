"""Reads a checkpoint without running any code that somebody put into it.

torch.distributed.checkpoint keeps the table of tensors as a pickle and numbers as pickles of torch.save; an
ordinary unpickler would call whatever these name.
"""

import io
import pickle
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_cp.checkpoint.manifest import METADATA_FILE, Manifest, read_manifest
from torchtitan_cp.config import ConfigError

# The classes that the table is made of, by module.
TABLE_CLASSES = {
    metadata.__name__: {
        name for name, value in vars(metadata).items() if getattr(value, "__module__", "") == metadata.__name__
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class TableUnpickler(pickle.Unpickler):
    """Unpickles the classes of torch's table of tensors, and no others.

    Raises:
        UnpicklingError: the pickle names anything else.
    """

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in TABLE_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a checkpoint must not contain")
        return super().find_class(module, name)


def _enum_member(enum: object, name: str) -> Enum:
    """A member of an enum, as which Python 3.11.0 to 3.11.3 pickles it: `getattr(enum, name)`."""
    if not (isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__):
        raise pickle.UnpicklingError(f"it refers to {name} of {enum}, which a checkpoint must not contain")
    return enum[name]


def read_table(folder: Path, manifest: Manifest) -> Metadata:
    """The table of tensors: in which file, and where in it, each one lies.

    Raises:
        ConfigError: it is not such a table, or names code to run or files outside the checkpoint.
    """
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            table = TableUnpickler(file).load()
        outside = {entry.relative_path for entry in table.storage_data.values()} - manifest.files.keys()
        if outside:
            raise pickle.UnpicklingError(f"it names {min(outside)}, which is not in the manifest")
    except Exception as error:  # a corrupt pickle may raise anything
        raise ConfigError(
            f"{folder / METADATA_FILE} is refused: {error}",
            fix=f"if you did not write this checkpoint yourself, do not use it; else delete {folder} to resume from "
            "another",
        ) from None
    return table


class CheckpointReader(FileSystemReader):
    """torch's reader, with the table of tensors read by `read_table`.

    Args:
        folder: a step-N folder with a manifest.

    Raises:
        ConfigError: the table cannot be read, or names code to run or files outside the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = read_table(folder, read_manifest(folder))

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.table


class CheckpointPlanner(DefaultLoadPlanner):
    """torch's planner, which takes numbers and texts from a checkpoint, and no other objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def load_state(reader: CheckpointReader, state: STATE_DICT_TYPE, *, no_dist: bool = False) -> None:
    """Fill a state dict in place, each rank its own shards.

    Args:
        no_dist: only this process reads; otherwise all ranks call.

    Raises:
        ConfigError: an entry is missing or cannot be read.
    """
    try:
        dcp.load(state, storage_reader=reader, planner=CheckpointPlanner(), no_dist=no_dist)
    except CheckpointException as error:  # a BaseException
        raise ConfigError(
            f"{reader.checkpoint_id} cannot be loaded: {describe_failure(error)}",
            fix="use another checkpoint of the run; it resumes from the one before if you delete this one",
        ) from None


def describe_failure(error: BaseException) -> str:
    """The first rank that failed, with the type and the first line of its error."""
    failures = error.failures if isinstance(error, CheckpointException) else {dist.get_rank(): (error, None)}
    rank, (cause, _) = next(iter(failures.items()))
    message, *_ = str(cause).strip().split("\n")
    return f"rank {rank}: {type(cause).__name__}: {message}"
