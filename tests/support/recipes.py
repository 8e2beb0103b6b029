"""The recipes of train_configs/ on a machine without their corpora and checkpoints, and walks of them."""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import ARCHITECTURES
from tests.support.chats import TURNS
from tests.support.gpu_walker import gpu_walker
from tests.support.pages import REPOSITORY
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run

FILES = sorted((REPOSITORY / "train_configs").glob("*.toml"))
# The GPU comes first, because with it the program starts again.
PROGRAM = """
from tests.support.fake_cuda import use_fake_cuda
use_fake_cuda("h100-80g")
from tests.support.recipes import walk_here
walk_here()
"""


def ranks_of(path: Path) -> int:
    """The ranks a file is written for, from its head."""
    line = re.search(r"^# Ranks: ([\d,]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert line, f"{path} does not say '# Ranks: N'"
    return int(line[1].replace(",", ""))


def without_checkpoint(path: Path) -> list[str]:
    """The words with which a file that starts from a checkpoint starts from fresh weights, from its head."""
    words = r"from fresh weights:\s+(?:# +)?(--model\S+(?: --model\S+)?)$"
    said = re.search(words, path.read_text(encoding="utf-8"), re.MULTILINE)
    return said[1].split() if said else []


def load(path: Path, dump_folder: Path, *overrides: str) -> Config:
    """The file as it is, but for the corpus, tokenizer, template and checkpoint, which do not come with it."""
    own = ["--data.source=python-stdlib", "--data.path=", "--tokenizer.kind=bytes", "--tokenizer.path="]
    for number, source in enumerate(load_config(path, []).data.sources):
        chat = ("source=python-docstrings", f"chat_template={source.chat_template or TURNS}", "messages_field=")
        keys = (*(chat if source.conversations else ("source=python-stdlib",)), "path=")
        own += [f"--data.sources[{number}].{key}" for key in keys]
    own += without_checkpoint(path)
    return load_config(path, [*own, f"--job.dump_folder={dump_folder}", *overrides])


def walk_on_gpu(path: Path, ranks: int, *overrides: str, stages: int = 0) -> list[float]:
    """Peak bytes of rank 0 in the first stages (0: all), by a walk with an H100's operations, in its own process."""
    given = json.dumps([str(path), ranks, overrides, stages])
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    peaks: list[float] = json.loads(done.stdout.rpartition("peaks: ")[2])
    return peaks


def walk_here() -> None:
    """Read (path, ranks, overrides, stages) as JSON, and print the peaks."""
    register(ARCHITECTURES)
    path, ranks, overrides, stages = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        config = load(Path(path), Path(folder), *overrides)
        run: Any = resolve_run(config, ranks, sized_model_args(config))
        run = dataclasses.replace(run, config=run.config.with_keys(compile={"enable": False}))
        with gpu_walker(run, 0) as walk:
            print("peaks:", json.dumps([walk(stage).peak_bytes for stage in run.stages[: stages or None]]))
