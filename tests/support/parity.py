"""--verify-parity on a rank, and what it wrote."""

import json
from pathlib import Path
from typing import Any

from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.parity import verify_parity
from torchtitan_cp.training.registry import register


def verify(path: Path, *overrides: str) -> bool:
    register(ARCHITECTURES)
    return verify_parity(load_config(path, overrides), start_ranks(60.0), 0)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run" / "parity.json").read_text())
