"""Reads a checkpoint without running any code that somebody put into it.

torch.distributed.checkpoint keeps the table of tensors as a pickle and numbers as pickles of torch.save; an
ordinary unpickler would call whatever these name.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_cp.checkpoint.manifest import METADATA_FILE, Manifest
from torchtitan_cp.config import ConfigError

# All that the table is made of.
TABLE_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class TableUnpickler(pickle.Unpickler):
    """Makes nothing but the classes of torch's table of tensors.

    Raises:
        UnpicklingError: the pickle names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name not in TABLE_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_table(folder: Path, manifest: Manifest) -> Metadata:
    """The table of tensors: where each lies in which file.

    Raises:
        ConfigError: it is no such table, names anything that could run code, or files that are not the checkpoint's.
    """
    fix = f"if you did not write this checkpoint yourself, do not use it; else delete {folder} to resume from another"
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            table = TableUnpickler(file).load()
    except Exception as error:
        # Whatever a spoiled pickle may raise.
        raise ConfigError(f"{folder / METADATA_FILE} is refused: {error}", fix=fix) from None
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise ConfigError(f"{folder / METADATA_FILE} is refused: it is no table of tensors", fix=fix)
    strange = {entry.relative_path for entry in table.storage_data.values()} - manifest.files.keys()
    if strange:
        raise ConfigError(f"{folder / METADATA_FILE} is refused: it names {sorted(strange)[0]}", fix=fix)
    return table


class CheckpointReader(FileSystemReader):
    """torch's reader, handed a table that has been read already.

    Args:
        folder: the checkpoint.
        table: from `read_table`.
    """

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(folder)
        self.table = table
        self.table.storage_meta = self.table.storage_meta or StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.table


class CheckpointPlanner(DefaultLoadPlanner):
    """torch's planner, which takes numbers and texts from a checkpoint, and no other objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
