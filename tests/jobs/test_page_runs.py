"""The trainings, jobs under Slurm and benchmarks of the pages, given to a shell as they stand there, but cut short.

Words that cut them stand behind their own: fewer steps, shorter sequences, --quick. A command without a cut fails here.
tests/ranks/docs/test_pages.py runs the other commands.
"""

import json
import math
import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MinistralConfig, MinistralForCausalLM

from tests.support.forked_python import forked_python
from tests.support.hub_models import SIZES
from tests.support.jobs import PATIENCE_SECONDS, lines_of
from tests.support.pages import COMMANDS, REPOSITORY, RUN_BY_OTHERS
from tests.support.runs import write_run
from torchtitan_cp.data.corpus.rows import zstd
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

# What stands in a reader's folder for the programs of the pages. CUT: words behind the command's own.
PROGRAMS = {
    "run_train.sh": f'exec "{REPOSITORY}/run_train.sh" "$@" $CUT',
    "bin/torchtitan-cp": 'exec "$VENV/bin/python" -m torchtitan_cp "$@" $CUT',
    "bin/python": 'exec "$VENV/bin/python" "$@" $CUT',
    # Two nodes that are this machine, of one rank each.
    "bin/sbatch": """
        while [[ "$1" == --* ]]; do case "$1" in *=*) shift ;; *) shift 2 ;; esac; done
        export SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=localhost NPROC=1 SLURM_JOB_ID=$$
        export SLURM_CPUS_PER_TASK=1
        exec bash "$@"
    """,
    "bin/scontrol": "echo localhost",
    "bin/srun": """
        [[ "$1 $2" == "--cpus-per-task=1 --kill-on-bad-exit=1" ]] || exit 1
        shift 2
        SLURM_NODEID=1 "$@" & second=$!
        SLURM_NODEID=0 "$@" && wait $second
    """,
}


def stages(number: int, seq_len: int = 0, tokens: int = 0, steps: int = 1) -> tuple[str, ...]:
    """Cuts of a curriculum's first stages; the lengths of each are twice those of the one before."""
    cuts = []
    for index in range(number):
        stage = f"--curriculum.stages[{index}]"
        cuts.append(f"{stage}.steps={steps}")
        if seq_len:
            cuts.append(f"{stage}.seq_len={seq_len << index}")
        if tokens:
            cuts.append(f"{stage}.global_batch_tokens={tokens}")
    return tuple(cuts)


# Of each config that the pages train, the words that cut it.
RUNS = {
    "train_configs/quickstart.toml": (*stages(3, seq_len=64, tokens=4096), "--evaluation.passkey.trials=1"),
    "train_configs/lora_on_cpu.toml": (*stages(2, seq_len=64, tokens=4096), "--evaluation.passkey.trials=1"),
    "train_configs/stdlib_on_cpu.toml": (*stages(3, seq_len=256, tokens=2048), "--model.overrides.n_layers=1"),
    "train_configs/six_stages_on_cpu.toml": (
        *stages(6, tokens=8192),
        "--curriculum.stages[5].data.growth_steps=1",
    ),
    "train_configs/huggingface_on_cpu.toml": stages(3),
    "train_configs/qwen3_5_on_cpu.toml": stages(3, seq_len=512, tokens=2048),
    # As bytes few conversations are short enough, so that few are packed.
    "train_configs/sft_on_cpu.toml": (
        *stages(2),
        "--curriculum.stages[1].lr.warmup_steps=1",
        "--tokenizer.kind=bytes",
    ),
    "train_configs/1m_on_cpu.toml": stages(1, seq_len=2048, tokens=2048),
    "train_configs/4k_to_1m_on_cpu.toml": stages(5, seq_len=512, tokens=8192),
    # A model of the same kind that a test makes: that of the command does not fit here.
    "train_configs/yarn_128k.toml": (
        *stages(2, seq_len=4096, tokens=8192),
        *(f"--curriculum.stages[{index}].lr.warmup_steps=1" for index in range(2)),
        "--data.validation_fraction=0.2",
        *("--model.flavor=debug", "--model.overrides.dim=48", "--model.overrides.n_layers=4"),
        *("--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=2", "--model.overrides.head_dim=12"),
        *("--model.overrides.ffn_dim=96", "--model.overrides.norm_eps=1e-6"),
        "--model.overrides.tie_embeddings=false",
    ),
    "my.toml": stages(1, tokens=1024, steps=2),
}
QUICKSTART = "./run_train.sh"
# Their Pythons are new ones, as a reader's are; those of the others are forks.
FRESH = (QUICKSTART, "python -m benchmarks start_up")
TRACED = (
    "CONFIG_FILE=train_configs/stdlib_on_cpu.toml ./run_train.sh '--profiling.steps=[20]' '--profiling.ranks=[0,1]'"
)
# Of each option of a benchmark that asks for long work, what is asked instead.
SMALL = {
    "--lengths": "256",
    "--seq-len": "2048",
    "--rounds": "2",
    "--ranks": "2",
    "--steps": "2",
    "--gigabytes-per-second": "1",
}
# Of a benchmark, what is asked beside.
SHORT = {"packed": ("--seq-len", "2048")}
# All benchmarks take minutes though each is quick: here are those that no other command of the pages runs.
REST = ("optimizer",)
# They differ from another command here in the values of keys alone, so a check is all that is asked of them.
CHECKED = (
    "CONFIG_FILE=train_configs/stdlib_on_cpu.toml ./run_train.sh --data.source=text --data.path=my_texts "
    "--job.dump_folder=outputs/mine",
    "CONFIG_FILE=train_configs/stdlib_on_cpu.toml ./run_train.sh --data.source=text --data.path=my_texts "
    "--job.dump_folder=outputs/mine --tokenizer.kind=bytes",
    "./run_train.sh --job.log_level=debug",
    "CONFIG_FILE=my.toml ./run_train.sh",
    "CONFIG_FILE=my.toml NPROC=8 ./run_train.sh --optimizer.lr=1e-4 '--curriculum.stages[0].steps=500'",
)
# Cut short, they do what another command does: only options of a cluster, numbers of ranks, lengths or rounds differ.
REPEATED = (
    "CONFIG_FILE=my.toml NPROC=8 ./run_train.sh --verify-parity --model.overrides.n_layers=2 "
    "--model.load_weights=false",
    "CONFIG_FILE=my.toml sbatch --dependency=singleton --nodes 8 --gpus-per-node 8 launch/slurm.sh",
    "CONFIG_FILE=my.toml sbatch --nodes 8 --gpus-per-node 8 launch/slurm.sh",
    "torchtitan-cp doctor my.toml",
    "torchtitan-cp doctor my.toml --ranks 2",
    "torchtitan-cp doctor my.toml --ranks 4",
    "python -m benchmarks end_to_end --lengths 1024 --rounds 7",
    "python -m benchmarks kernels",
    "python -m benchmarks packed",
    "python -m benchmarks plan --ranks 8 --rounds 8",
)
# Its output is on the page.
SHOWN = "torchtitan-cp doctor train_configs/huggingface_on_cpu.toml --ranks 2"
CHECK = """#!/usr/bin/env bash
FILE="${CONFIG_FILE:-train_configs/quickstart.toml}"
exec "$VENV/bin/python" -m torchtitan_cp check "$FILE" --ranks "${NPROC:-2}" "$@" $CUT
"""


def cut_of(command: str) -> tuple[str, ...]:
    """Words behind the command's own.

    Raises:
        KeyError: this command of the pages has none yet.
    """
    if "python -m benchmarks" in command:
        if command.endswith("--help"):
            return ()
        alone = REST if command == "python -m benchmarks" else ()
        return (
            *alone,
            "--quick",
            *(word for option, few in SMALL.items() if option in command for word in (option, few)),
            *(word for name, words in SHORT.items() if f"benchmarks {name} " in f"{command} " for word in words),
        )
    if "doctor" in command:
        return ()
    two_ranks = ("--nproc=2",) if re.search("nproc[= ]8", command, re.IGNORECASE) and command not in CHECKED else ()
    if "--verify-parity" in command:
        return ("--curriculum.stages[0].global_batch_tokens=8192", *two_ranks)
    config = re.match(r"(?:CONFIG_FILE=|torchtitan-cp train )(\S+)", command)
    cut = RUNS[config[1] if config else "train_configs/quickstart.toml"]
    cut = (*cut, *two_ranks, "--lr_scheduler.warmup_steps=1", "--evaluation.tokens=4096")
    if command != QUICKSTART:  # pictures take seconds of each run
        cut = (*cut, "--metrics.tensorboard=false")
    return (*cut, *stages(1, steps=20)) if command == TRACED else cut


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers and tokens of all runs, made once, by whichever worker is the first to need them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pages-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment like this one, whose Python's runs are forks."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "bin").mkdir()
    requirements = b"".join((REPOSITORY / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    done = subprocess.run(["cksum"], input=requirements, capture_output=True, check=True)
    (folder / ".torchtitan-cp-base").write_text(f"{REPOSITORY} {done.stdout.decode()}")
    with forked_python(folder / "bin"):
        yield folder


@pytest.fixture
def desk(tmp_path: Path, cache: Path) -> Path:
    """A reader's folder, with all that the pages tell him to have: configs, texts, a model, its tokenizer."""
    for name, program in PROGRAMS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(program)}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    for name in ("train_configs", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "cache").symlink_to(cache)
    write_run(tmp_path).rename(tmp_path / "my.toml")
    (tmp_path / "my_texts").mkdir()
    for path in sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]:
        (tmp_path / "my_texts" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def give_checkpoint(folder: Path) -> None:
    """What the YaRN recipe starts from, of a size for tests: a Llama of transformers, a tokenizer.model and books."""
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 512})).save_pretrained(folder / "llama2-7b")
    texts = [path.read_bytes().decode("ascii", "ignore") for path in sorted((folder.parent / "corpus").glob("*.py"))]
    train_sentencepiece(iter(texts), 512, folder / "llama2-7b" / "tokenizer.model")
    (folder / "books").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "books" / "all.jsonl.zst").write_bytes(zstd.compress(lines.encode()))


def give_export(folder: Path) -> None:
    """What the recipe for adapters starts from, of a size for tests: windows in some layers, as in the quickstart."""
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = MinistralConfig(**SIZES | windows | {"vocab_size": 257, "head_dim": 12})
    MinistralForCausalLM(config).save_pretrained(folder)


def without_rounding(report: str) -> str:
    """A doctor's report without what differs between machines: rounding errors, digits of the loss, memory."""
    return re.sub(r"\d\.\de-\d\d|(?<=\.\d\d)\d+|\d+(?= MiB)", "", report)


RUN_HERE = sorted({command.partition(" #")[0].strip() for _, command in COMMANDS if RUN_BY_OTHERS.search(command)})


def test_what_is_not_run_again_stands_on_the_pages() -> None:
    assert {*CHECKED, *REPEATED} <= {*RUN_HERE}


@pytest.mark.parametrize(("program", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)])
def test_what_fails_in_a_fork_fails(program: str, code: int, forked: Path) -> None:
    done = subprocess.run(
        [forked / "bin" / "python", "-c", f"import os, sys; {program}"], capture_output=True, check=False
    )
    assert done.returncode == code
    assert (b"ZeroDivisionError" in done.stderr) == (code == 1)


@pytest.mark.parametrize("command", [command for command in RUN_HERE if command not in REPEATED])
def test_a_run_of_the_pages_does_what_it_says(command: str, desk: Path, forked: Path) -> None:
    cut, environment = cut_of(command), sys.prefix if command in FRESH else str(forked)
    if command in CHECKED:
        (desk / "run_train.sh").write_text(CHECK)
    if "/data/" in command:
        give_checkpoint(desk / "data")
        command = command.replace("/data/", f"{desk}/data/")
    if "lora_on_cpu" in command:
        give_export(desk / "outputs" / "quickstart_64")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=desk,
        env={
            **os.environ,
            "CUT": " ".join(cut),
            "PATH": f"{desk / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "VENV": environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command in CHECKED:
        assert re.search(r"\d steps? on \d+ ranks: ", done.stdout), done.stdout
    elif "benchmarks" in command:
        assert "--help" in command or re.search(r"^\|-+\|", done.stdout, re.MULTILINE), done.stdout
        assert (desk / "scale.json").exists() == ("scale.json" in command)
    elif "doctor" in command:
        assert "safe: nothing differs" in done.stdout
        if command == SHOWN:
            page = (REPOSITORY / "docs/doctor.md").read_text()
            [sample] = re.findall(r"^```text\n(layer .*?)^```", page, re.MULTILINE | re.DOTALL)
            assert without_rounding(sample) in without_rounding(done.stdout)
    elif "--verify-parity" in command:
        assert "parity holds" in done.stdout
    else:
        [metrics] = desk.rglob("metrics.jsonl")
        lines, wanted = lines_of(metrics.parent), dict(word.split("=") for word in cut)
        assert len(lines) == sum(int(value) for name, value in wanted.items() if name.endswith(".steps"))
        assert all(math.isfinite(line["loss"]) for line in lines)
