"""The commands of the pages that need no hours and no cluster, run as they stand there; dry runs on two layers.

A small run and its config stand in for the reader's. tests/jobs/test_page_runs.py runs trainings, parity and
benchmarks; tests/unit/docs/test_docs.py accounts for each word of all commands.
"""

import contextlib
import io
import itertools
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.chats import TURNS, turns, write_rows
from tests.support.inject import Inject, train_with_fault
from tests.support.pages import COMMANDS, REPOSITORY, RUN_BY_OTHERS
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, write_run

# A second stage, on conversations.
CHATS = """
[[data.sources]]
name = "text"
source = "text"
path = "{folder}/corpus"
validation_fraction = 0.25

[[data.sources]]
name = "chats"
source = "jsonl"
path = "{folder}/chats.jsonl"
messages_field = "messages"
chat_template = "{turns}"
validation_fraction = 0.25

[[curriculum.stages]]
seq_len = 128
steps = 1
global_batch_tokens = 512
data = {mixture = {text = 1.0, chats = 1.0}}
"""


@dataclass(frozen=True)
class Reader:
    """What a reader has on disk.

    Attributes:
        run: folder of a run whose step 3 was bad.
        config: enough sequences in a step for 64 ranks.
        new: for what is written.
    """

    run: Path
    config: Path
    new: Path

    def word(self, word: str) -> str:
        """What this reader writes in place of a word of the pages, as `standing_for` knows it."""
        places = {
            BAD_STEP: lambda: next((self.run / "health").iterdir()),
            CHECKPOINT: lambda: max((self.run / "checkpoints").glob("step-*")),
            RUN: lambda: self.run,
            "my.toml": lambda: self.config,
            **{name: lambda: self.new / word for name in WRITTEN},
        }
        return str(places[word]()) if word in places else word


BAD_STEP, CHECKPOINT, RUN = "outputs/run/health/step", "outputs/run/checkpoints/step", "outputs/run"
WRITTEN = {"hub/", "exported", "exported/", "OUT", "mine.toml"}


def standing_for(word: str) -> str:
    """The one run of the reader stands for all that the pages name."""
    if not word.startswith("outputs/"):
        return word
    return BAD_STEP if "/health/" in word else CHECKPOINT if "/checkpoints/" in word else RUN


def words_of(command: str) -> tuple[str, ...]:
    """Of a command, without a comment or where its output goes."""
    words = itertools.takewhile(lambda word: word != ">", shlex.split(command, comments=True))
    return tuple(map(standing_for, words))


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    write_rows(folder / "chats.jsonl", [{"messages": turns("What?", "This.")}] * 40)
    path = write_run(folder)
    plain = 'source = "text"\npath = "{folder}/corpus"\n'
    own = TINY.replace(plain, "").replace("validation_fraction = 0.25\n", "").format(folder=folder)
    path.write_text(own + CHATS.replace("{folder}", str(folder)).replace("{turns}", str(TURNS)))
    ranks(1)(train_with_fault, Inject(step=3, where="data"), path, "--health.on_nonfinite=skip")
    return path.parent / "run"


@pytest.fixture
def reader(run: Path, tmp_path: Path) -> Reader:
    config = TINY.replace("global_batch_tokens = 512", "global_batch_tokens = 8192")
    return Reader(run, write_run(tmp_path, config), tmp_path / "new")


# A page may say of another run, or with other words behind "#", what another page says.
# Of runs that this reader does not have, with adapters, conversations or several stages, of a large model's search, or
# of a package that only a GPU needs: tests/unit/cli/test_preview.py, tests/ranks/models/test_peft.py,
# tests/ranks/training/test_lora_recipe.py, tests/unit/planner/test_fits.py and tests/unit/benchmarks/test_flash4.py.
NEEDS_ANOTHER = re.compile(
    r"export outputs/(run (adapter|whole)|quickstart/|lora)|preview my\.toml --|plan .* --search .*--ranks"
    r"|benchmarks\.flash4"
)
ONCE = sorted(
    {
        words_of(command)
        for _, command in COMMANDS
        if not RUN_BY_OTHERS.search(command) and not NEEDS_ANOTHER.search(command)
    }
)


@pytest.mark.deep
@pytest.mark.parametrize("command", ONCE, ids=" ".join)
def test_a_command_of_the_pages_does_what_it_says(
    command: tuple[str, ...], reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = list(command)
    config = str(REPOSITORY / "train_configs" / "quickstart.toml")
    if words[0].startswith("CONFIG_FILE="):
        config = reader.word(words.pop(0).partition("=")[2])
    if "--dry-run" in words:  # all the layers of a large model take a minute
        words.append("--model.overrides.n_layers=2")
    if words[0] == "torchrun":  # here one rank
        words = ["python", *words[words.index("-m") :]]
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("sys.stdin", io.StringIO("What does read do?\n"))
    reader.new.mkdir()
    code: Any = 0
    try:
        # Not here: a dry run forks, and after the backward of another one a CUDA build's process has a thread.
        if words[0] == "./run_train.sh":
            own = [sys.executable, "train.py", config, *words[1:]]
            done = subprocess.run(own, capture_output=True, text=True, check=False)
            print(done.stdout, file=sys.stdout)
            print(done.stderr, file=sys.stderr)
            code = done.returncode
        else:
            module, arguments = ("torchtitan_cp", words[1:]) if words[0] == "torchtitan-cp" else (words[2], words[3:])
            monkeypatch.setattr(sys, "argv", ["program", *map(reader.word, arguments)])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    assert not code, capsys.readouterr().err
    written = list(reader.new.iterdir())
    assert capsys.readouterr().out.strip("\n") or written  # a small model may answer with spaces
    assert bool(written) == bool(set(words) & WRITTEN)


def run_example(code: str) -> str:
    """On a rank, whose process group is there and stays."""
    with (
        patch("torch.distributed.init_process_group"),
        patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        exec(code, {})
    return said.getvalue()


def test_the_program_of_the_page_on_context_parallelism_runs(ranks: Callable[[int], RankPool]) -> None:
    page = (REPOSITORY / "docs/context_parallel.md").read_text()
    [code] = re.findall(r"^```python\n(# example\.py.*?)^```", page, re.MULTILINE | re.DOTALL)
    first, other = ranks(2)(run_example, code)
    assert re.fullmatch(r"loss (\S+) on 2 ranks, \1 on one process; their gradients are equal\n", first)
    assert not other
