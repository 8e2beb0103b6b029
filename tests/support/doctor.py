"""The doctor of a config on a rank."""

from pathlib import Path

from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.doctor import run_doctor
from torchtitan_cp.training.registry import register


def diagnose(path: Path, *overrides: str) -> bool:
    register(ARCHITECTURES)
    return run_doctor(load_config(path, overrides), start_ranks(60.0), 0)
