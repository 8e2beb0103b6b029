"""The run's folder: what a run writes there before its first step."""

import shutil
from pathlib import Path

from torchtitan_cp.checkpoint.weights import TOKENIZER_FILE
from torchtitan_cp.config import Config, to_toml
from torchtitan_cp.config.check import check_dump_folder
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, trains_tokenizer


def write_run_folder(config: Config, tokenizer: Tokenizer) -> Path:
    """Create the folder with config.toml and a tokenizer that was trained. Rank 0 calls this.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(config.job.dump_folder)
    check_dump_folder(config.job.dump_folder)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    if tokenizer.path and trains_tokenizer(config.tokenizer):
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
    return folder
