"""The pages that people read: the site builds without a warning, and every command in them is one that exists."""

import argparse
import importlib
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config as load_site

from benchmarks.__main__ import BENCHMARKS
from models import ARCHITECTURES
from tests.support.pages import COMMAND, COMMANDS, PAGES, REPOSITORY
from torchtitan_cp.__main__ import COMMANDS as COMMANDS_BY_NAME
from torchtitan_cp.config import UserError, load_config
from torchtitan_cp.config.load import OVERRIDE
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import resolve_run

# Configs that a reader writes, and what environment variables of others begin with.
OWN_CONFIGS = {"my.toml", "mine.toml"}
OF_OTHERS = ("OMP_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_")
SBATCH_OPTIONS = {"--nodes", "--gpus-per-node", "--dependency", "--job-name", "--signal", "--requeue"}
QUICKSTART = "train_configs/quickstart.toml"
TRAIN = "train"
TAKE_OVERRIDES = (TRAIN, *(f"torchtitan_cp.cli.{name}" for name in ("train", "check", "plan")))


class WrongCommandError(Exception):
    """A command of the pages would not do what it says."""


class ParsedError(Exception):
    """Not an error: a program has read its arguments, and goes no further."""

    def __init__(self, options: argparse.Namespace, rest: list[str]) -> None:
        self.options, self.rest = options, rest


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., ParsedError]:
    """Runs a program's own `main` as far as its arguments: what it makes of them, and what it does not know."""
    know = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, arguments: list[str], namespace: None = None) -> None:
        raise ParsedError(*know(self, arguments, namespace))

    def parsed(main: Callable[[list[str]], int], arguments: list[str]) -> ParsedError:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        try:
            main(arguments)
        except ParsedError as found:
            # Overrides are taken out before.
            out = [word for word in arguments if re.match(r"--[^=]*\.", word) and word not in found.rest]
            return ParsedError(found.options, [*found.rest, *out])
        except SystemExit as left:
            if left.code:
                raise WrongCommandError(capsys.readouterr().err) from None
            return ParsedError(argparse.Namespace(), [])  # --help
        finally:
            monkeypatch.undo()
        raise WrongCommandError("it reads no arguments")

    return parsed


def check(command: str, parse: Callable[..., ParsedError]) -> None:
    """Account for each word of a command.

    Raises:
        WrongCommandError: one that is not known, or a file that does not exist.
    """
    words = list(itertools.takewhile(lambda word: word != ">", shlex.split(command, comments=True)))
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = words.pop(0)
    if program == "torchrun":
        words = words[words.index("-m") - 1 :]
        program, words = "python", words[1:]
    if program == "sbatch":
        words = _behind_script(words)
        program = "./run_train.sh"
    if program == "./run_train.sh":
        known = (REPOSITORY / "run_train.sh").read_text()
        module, arguments = TRAIN, [_config(variables.get("CONFIG_FILE", QUICKSTART)), *words]
    elif program == "torchtitan-cp":
        if words[0] not in COMMANDS_BY_NAME:
            raise WrongCommandError(f"there is no command {words[0]}")
        known, module, arguments = "", COMMANDS_BY_NAME[words[0]][0], words[1:]
    elif words[0] == "-m":
        known, module, arguments = "", words[1], words[2:]
    else:
        known, module, arguments = "", words[0].removesuffix(".py"), words[1:]
    for name in variables:
        if not name.startswith(OF_OTHERS) and not re.search(rf"\b{name}\b", known):
            raise WrongCommandError(f"{name} is read by nobody")
    if module == "benchmarks":
        _check_benchmarks(arguments, parse)
    else:
        _check_program(module, arguments, parse)


def _behind_script(words: list[str]) -> list[str]:
    """What sbatch hands on, its own options looked at."""
    script = next((at for at, word in enumerate(words) if word.endswith(".sh")), None)
    if script is None or not (REPOSITORY / words[script]).is_file():
        raise WrongCommandError("sbatch starts no script of ours")
    for word in words[:script]:
        if word.startswith("--") and word.partition("=")[0] not in SBATCH_OPTIONS:
            raise WrongCommandError(f"sbatch {word} is not in this test's list; see whether it exists")
    return words[script + 1 :]


def _config(name: str) -> str:
    """The path of a config that comes with us; one that readers write themselves is taken to be the quickstart."""
    path = REPOSITORY / (QUICKSTART if name in OWN_CONFIGS else name)
    if not path.is_file():
        raise WrongCommandError(f"there is no {name}")
    return str(path)


def _check_program(module: str, arguments: list[str], parse: Callable[..., ParsedError]) -> None:
    """A program of ours; where it takes a config and overrides, they make a config, of a model that is known."""
    try:
        loaded = importlib.import_module(module)
        if not hasattr(loaded, "main") and hasattr(loaded, "__path__"):
            loaded = importlib.import_module(f"{module}.__main__")
    except ImportError as error:
        raise WrongCommandError(f"python -m {module}: {error}") from None
    if not arguments and not hasattr(loaded, "main"):
        return
    found = parse(loaded.main, arguments)
    if module not in TAKE_OVERRIDES:
        if found.rest:
            raise WrongCommandError(f"{module} does not know {found.rest}")
        return
    unknown = [word for word in found.rest if not OVERRIDE.fullmatch(word)]
    if unknown:
        raise WrongCommandError(f"{module} does not know {unknown}")
    if not vars(found.options):
        return
    try:
        config = load_config(_config(found.options.config), found.rest)
        registry.register(ARCHITECTURES)
        # A checkpoint to start from lies on the reader's disk.
        if not config.model.hub_checkpoint:
            registry.model_args_of(config.model)
    except UserError as error:
        raise WrongCommandError(str(error)) from None


def _check_benchmarks(arguments: list[str], parse: Callable[..., ParsedError]) -> None:
    """Names of benchmarks, and options of the one that is named."""
    main = importlib.import_module("benchmarks.__main__").main
    rest = parse(main, arguments).rest
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
    own = rest[len(names) :]
    for name in names:
        if name not in BENCHMARKS:
            raise WrongCommandError(f"there is no benchmark {name}")
    if own and len(names) != 1:
        raise WrongCommandError(f"benchmarks does not know {own}")
    if not own:
        return
    name = names[0]
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    found = parse(benchmark.parser(name, BENCHMARKS[name], False).parse_args, own)
    if found.rest:
        raise WrongCommandError(f"benchmark {name} does not know {found.rest}")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build(load_site(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert {path.stem for path in tmp_path.glob("*.html")} >= {page.stem for page in PAGES} - {"README"}


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS])
def test_a_command_of_the_pages_is_one_that_exists(page: str, command: str, parse: Callable[..., ParsedError]) -> None:
    check(command, parse)


def test_the_config_of_the_page_that_extends_a_checkpoint_runs_on_a_node(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "how_to.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my.toml").write_text(shown)
    registry.register(ARCHITECTURES)
    for rope in ("theta = 8e6", 'kind = "yarn", factor = 8.0, original_seq_len = 8192'):
        # In place of the reader's checkpoint, a flavor of that kind.
        given = ["--model.hub_checkpoint=", "--model.flavor=8B", f"--curriculum.stages[0].rope={{{rope}}}"]
        [stage] = resolve_run(load_config(tmp_path / "my.toml", given), 8, device="cuda").stages
        assert (stage.cp, stage.dp, stage.micro_batches, stage.steps) == (8, 1, 64, 239)


def test_every_page_that_shows_a_command_of_ours_has_it_looked_at() -> None:
    for page in PAGES:
        fenced = re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        shown = [line for block in fenced for line in block.splitlines() if re.search(r"run_train\.sh|-m torcht", line)]
        found = [command for name, command in COMMANDS if name == page.name]
        assert len(found) >= len(shown), f"{page.name}: {shown}"
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("./run_train.sh --verify-parities", "does not know"),
        ("./run_train.sh --optimizer.rate=1e-4", "unknown key optimizer.rate"),
        ("./run_train.sh --curriculum.stages[7].steps=5", "does not exist"),
        ("./run_train.sh --model.flavor=9B", "'9B' is not known"),
        ("./run_train.sh --activation.checkpoint=some", "'some' is not known"),
        ("./run_train.sh --ranks many", "invalid int value"),
        ("CONFIG=my.toml ./run_train.sh", "read by nobody"),
        ("CONFIG_FILE=train_configs/none.toml ./run_train.sh", "there is no train_configs/none.toml"),
        ("CONFIG_FILE=my.toml sbatch --machines 8 launch/slurm.sh", "--machines"),
        ("sbatch --nodes 8 launch/slurm.sh --lr=1", "unknown section lr"),
        ("sbatch --nodes 8 launch/none.sh", "no script"),
        ("torchtitan-cp check my.toml --ranks", "expected one argument"),
        ("python -m torchtitan_cp.plan my.toml", "No module named"),
        ("torchtitan-cp plan my.toml --device h99", "invalid choice: 'h99'"),
        ("torchtitan-cp generate outputs/run", "--prompt --chat"),
        ("torchtitan-cp generate outputs/run --chat --prompt a", "not allowed with"),
        ("torchtitan-cp generates outputs/run", "there is no command generates"),
        ("torchrun --nproc-per-node 8 -m torchtitan_cp.cli.evaluate outputs/run --length 5 --deep 3", "does not know"),
        ("python -m benchmarks speeds", "there is no benchmark speeds"),
        ("python -m benchmarks strategies --kernels flash", "does not know"),
        ("python -m benchmarks --lengths 4096", "does not know"),
    ],
)
def test_a_command_that_would_not_run_is_found(command: str, why: str, parse: Callable[..., ParsedError]) -> None:
    assert COMMAND.match(command)
    with pytest.raises(WrongCommandError, match=re.escape(why)):
        check(command, parse)
