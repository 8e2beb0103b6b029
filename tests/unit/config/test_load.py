"""Reading the TOML: every mistake gets one message with the file, the key, and the way out."""

import dataclasses
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_cp.config import Config, ConfigError, load_config, to_toml
from torchtitan_cp.config.training import ParameterGroup

REPOSITORY = Path(__file__).parents[3]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def message_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value)


def test_a_key_of_the_wrong_name_suggests_the_nearest(tmp_path: Path) -> None:
    message = message_of(tmp_path, "[training]\ncompute_dtyp = 'float32'")
    assert "run.toml: unknown key training.compute_dtyp" in message
    assert "did you mean compute_dtype?" in message


def test_a_section_of_the_wrong_name_suggests_the_nearest(tmp_path: Path) -> None:
    assert "unknown section trainig\n  fix: did you mean training?" in message_of(tmp_path, "[trainig]\nseed = 1")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("--lr=1e-4", "optimizer.lr"),
        ("--rank=8", "lora.rank"),
        ("--enable=false", "compile.enable or checkpoint.enable"),
    ],
)
def test_a_key_without_its_section_suggests_where_it_is(tmp_path: Path, override: str, meant: str) -> None:
    assert f"\n  fix: did you mean {meant}?" in message_of(tmp_path, "", override)


def test_a_key_like_no_other_lists_what_is_known(tmp_path: Path) -> None:
    assert "known here: " in message_of(tmp_path, "[health]\nzzzz = 1")


def test_a_nested_key_of_a_stage_is_named_by_its_place(tmp_path: Path) -> None:
    message = message_of(tmp_path, "[[curriculum.stages]]\nrope = {thta = 1.0}")
    assert "unknown key curriculum.stages[0].rope.thta" in message
    assert "did you mean theta?" in message


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("[training]\nseed = 1.5", "training.seed must be an integer, got 1.5"),
        ("[training]\nseed = true", "training.seed must be an integer, got True"),
        ("[data]\nmixture = {code = '1'}", "data.mixture.code must be a number, got '1'"),
        ("[training]\nmax_grad_norm = 'one'", "training.max_grad_norm must be a number, got 'one'"),
        ("[checkpoint]\nenable = 1", "checkpoint.enable must be true or false, got 1"),
        ("[job]\ndump_folder = 3", "job.dump_folder must be a string, got 3"),
        ("training = 3", "training must be a table, got 3"),
        ('[job]\ndump_folder = "a\\u0000b"', "job.dump_folder holds a NUL character"),
        (f"[optimizer]\nlr = 1{'0' * 400}", "optimizer.lr is beyond TOML's integers of 64 bits"),
        (f"[[curriculum.stages]]\ntokens = 1{'0' * 400}", "stages[0].tokens is beyond TOML's integers of 64 bits"),
        (f"[optimizer]\nlr = 1{'0' * 5000}", "run.toml: Exceeds the limit (4300 digits)"),
        (f"[optimizer]\nlr = {'[' * 3000}", "run.toml: TOML inline arrays/tables are nested more than"),
        ("[curriculum]\nstages = 3", "curriculum.stages must be a list, got 3"),
        ("[model]\noverrides = 3", "model.overrides must be a table, got 3"),
        ("[training]\nseed = -1", "training.seed = -1 is too small"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan is not a finite number\n  fix: give a finite number"),
        ("[optimizer]\nlr = inf", "optimizer.lr = inf is not a finite number"),
        ("[optimizer]\neps = 0.0", "optimizer.eps = 0.0 is too small"),
        ("[optimizer]\nbeta1 = 2", "optimizer.beta1 = 2.0 is too large\n  fix: use a number below 1"),
        ("[lr_scheduler]\nend_fraction = 7", "lr_scheduler.end_fraction = 7.0 is too large\n  fix: use at most 1"),
        ("[evaluation]\nmax_share = 5", "evaluation.max_share = 5.0 is too large\n  fix: use at most 1"),
        ("[data]\nvalidation_fraction = 2", "data.validation_fraction = 2.0 is too large\n  fix: use a number below 1"),
        ("[data]\nmixture = {code = -1}", "data.mixture = -1.0 is too small"),
        (
            "[parallel]\ncp = 0",
            "parallel.cp = 0 is neither a number of ranks nor -1\n  fix: use 1 or more, or -1 for the remaining ranks",
        ),
        ("[[curriculum.stages]]\ntp = 0", "curriculum.stages[0].tp = 0 is neither a number of ranks nor -1"),
        ("[profiling]\nsteps = [3, 0]", "profiling.steps = 0 is too small"),
        ("[evaluation.passkey]\nvariants = ['essay']", "evaluation.passkey.variants = 'essay' is not known"),
        ("[[curriculum.stages]]\nlr = {end_fraction = 7}", "stages[0].lr.end_fraction = 7.0 is too large"),
        ("[[curriculum.stages]]\ndata = {short_share = 2}", "stages[0].data.short_share = 2.0 is too large"),
        (
            "[health]\non_nonfinite = 'ignore'",
            "health.on_nonfinite = 'ignore' is not known\n  fix: use one of halt, skip",
        ),
        ("[evaluation.passkey]\nvariants = ['passkey', 'guess']", "evaluation.passkey.variants = 'guess' is not known"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(tmp_path: Path, line: str, wanted: str) -> None:
    assert wanted in message_of(tmp_path, line)


def numbers(section: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every key that holds a number, alone, in a list or in a table."""
    for entry in dataclasses.fields(section):
        kind, name = typing.get_type_hints(section)[entry.name], where + entry.name
        items = [item for item in (kind, *typing.get_args(kind)) if item is not type(None)]
        section_of_it = next((item for item in items if dataclasses.is_dataclass(item)), None)
        if section_of_it:
            yield from numbers(section_of_it, name + ("[0]." if typing.get_origin(kind) is tuple else "."))
        elif float in items or int in items:
            yield name, kind


def table_of(name: str, kind: Any, text: str) -> str:
    """A file with this number at a key."""
    listed, tabled = "tuple" in str(kind), "dict" in str(kind)
    value = f"[{text}]" if listed else f"{{a = {text}}}" if tabled else text
    *parents, key = name.split(".")
    header = ".".join(parent.removesuffix("[0]") for parent in parents)
    is_list = parents[-1].endswith("[0]")
    outer = "[[curriculum.stages]]\n" if header.startswith("curriculum.stages.") else ""
    return f"{outer}{'[[' if is_list else '['}{header}{']]' if is_list else ']'}\n{key} = {value}\n"


def test_every_number_is_finite_and_bounded_below(tmp_path: Path) -> None:
    """Every key is walked; `until` is the one table whose numbers may be negative."""
    found = list(numbers(Config))
    assert len(found) > 80
    for name, kind in found:
        if "float" in str(kind):
            for text in ("inf", "nan"):
                assert "is not a finite number" in message_of(tmp_path, table_of(name, kind, text)), name
        if not name.endswith(("until", "long_factor", "short_factor")):
            assert "is too small" in message_of(tmp_path, table_of(name, kind, "-2")), name


def test_every_fraction_is_at_most_one(tmp_path: Path) -> None:
    names = [name for name, _ in numbers(Config) if re.search(r"(fraction|share|beta1|beta2)$", name)]
    assert len(names) == 10
    for name in names:
        assert "is too large" in message_of(tmp_path, table_of(name, float, "1.5")), name


def test_every_error_of_a_file_says_how_to_correct_it(tmp_path: Path) -> None:
    for kind, value in ((int, "'x'"), (float, "'x'"), (bool, "1"), (str, "1"), (dict, "1")):
        keys = {int: "training.seed", float: "optimizer.lr", bool: "compile.enable", str: "job.description"}
        section, key = keys.get(kind, "model.overrides").split(".")
        assert "\n  fix: write " in message_of(tmp_path, f"[{section}]\n{key} = {value}")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="fix: give a TOML file saved as UTF-8"):
        load_config(tmp_path / "binary.toml")


def test_an_integer_serves_where_a_number_is_wanted(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "[training]\nmax_grad_norm = 2")).training.max_grad_norm == 2.0


def test_a_syntax_error_names_file_line_and_column(tmp_path: Path) -> None:
    message = message_of(tmp_path, "[job]\ndump_folder = outputs")
    assert f"{tmp_path / 'run.toml'}, line 2, column 15" in message


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "binary.toml")


def test_overrides_win_and_reach_into_stages(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[training]\nseed = 1\n[[curriculum.stages]]\nseq_len = 8\n[[curriculum.stages]]\nseq_len = 16"
    )
    config = load_config(
        path,
        [
            "--training.seed=7",
            "--job.dump_folder=here/there",
            "--curriculum.stages[1].steps=5",
            "--curriculum.stages.0.rope.theta=5e5",
            "--model.overrides={n_layers = 2}",
            "--checkpoint.enable=false",
            "--compile.enable=True",
            "--data.mixture.my-web=2",
        ],
    )
    assert config.training.seed == 7
    assert config.job.dump_folder == "here/there"
    assert config.curriculum.stages[1].steps == 5
    assert config.curriculum.stages[0].rope.theta == 5e5
    assert config.model.overrides == {"n_layers": 2}
    assert config.checkpoint.enable is False
    assert config.compile.enable is True, "as Python writes it"
    assert config.data.mixture == {"my-web": 2.0}, "names of sources may hold '-'"


@pytest.mark.parametrize(
    ("end", "overrides", "wanted"),
    [
        ("tokens = 9000", ["--curriculum.stages[0].steps=2"], (2, 0, {})),
        ("until = {validation_loss = 2, max_tokens = 9}", ["--curriculum.stages.0.steps=2"], (2, 0, {})),
        ("steps = 9", ["--curriculum.stages[0].until={validation_loss = 2.5}"], (0, 0, {"validation_loss": 2.5})),
        ("steps = 9", ["--curriculum.stages[0].steps=2", "--curriculum.stages[0].tokens=3"], (2, 3, {})),
        ("steps = 9", ["--curriculum.stages[0].seq_len=2"], (9, 0, {})),
    ],
)
def test_the_end_of_a_stage_on_the_command_line_replaces_that_of_the_file(
    tmp_path: Path, end: str, overrides: list[str], wanted: tuple[int, int, dict[str, float]]
) -> None:
    """Two on the command line both count, and are refused later."""
    stage = load_config(write(tmp_path, f"[[curriculum.stages]]\n{end}\n"), overrides).curriculum.stages[0]
    assert (stage.steps, stage.tokens, stage.until) == wanted


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("--training.sed=7", "did you mean seed?"),
        ("-x", "cannot read the argument '-x'"),
        ("training.seed=7", "write --section.key=value"),
        ("--curriculum.stages[3].steps=1", "[3] does not exist in a list of 1"),
        ("--training.seed.x=1", "[x] does not exist in the value 1"),
        (f"--optimizer.lr=1{'0' * 5000}", "optimizer.lr must be a number, got '1000"),
        (f"--training.seed={'[' * 3000}", "training.seed must be an integer, got '[[["),
        ("--training.seed=1\nlr = 2", r"training.seed must be an integer, got '1\nlr = 2'"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, wanted: str) -> None:
    text = "[training]\nseed = 1\n[[curriculum.stages]]\nseq_len = 8"
    assert wanted in message_of(tmp_path, text, override)


@pytest.mark.parametrize("key", ["hub_checkpoint", "config", "flavor"])
def test_overrides_that_empty_what_the_model_is_are_refused_and_another_model_is_not(tmp_path: Path, key: str) -> None:
    text = f'[model]\n{key} = "somewhere"\noverrides = {{n_layers = 2}}'
    wanted = f"after the overrides nothing says which model is meant; the file has model.{key}"
    for emptied in ([f"--model.{key}="], [f"--model.{key}=''"], ["--model={}"], ["--model.flavor=", f"--model.{key}="]):
        message = message_of(tmp_path, text, *emptied)
        assert wanted in message
        assert "--model.load_weights=false" in message
    other = load_config(write(tmp_path, text), [f"--model.{key}=", "--model.flavor=debug"]).model
    assert (other.flavor, other.hub_checkpoint, other.config) == ("debug", "", "")
    assert load_config(write(tmp_path, "[training]\nseed = 1"), [f"--model.{key}="]).model.flavor == ""


def test_the_resolved_config_is_a_valid_config_and_the_same(tmp_path: Path) -> None:
    config = load_config(REPOSITORY / "train_configs" / "quickstart.toml", ["--curriculum.stages[0].lr={peak = 1e-3}"])
    assert load_config(write(tmp_path, to_toml(config))) == config
    assert load_config(write(tmp_path, to_toml(Config()))) == Config()


def test_every_config_that_ships_loads() -> None:
    shipped = sorted((REPOSITORY / "train_configs").glob("*.toml"))
    assert shipped
    for path in shipped:
        load_config(path)


def test_rules_for_parameters_are_tables_of_the_file(tmp_path: Path) -> None:
    text = (
        "[[optimizer.groups]]\nmatch = 'norm'\nlr_scale = 0.5\n[[optimizer.groups]]\nmatch = 'output'\nweight_decay = 0"
    )
    rules = load_config(write(tmp_path, text)).optimizer.groups
    assert rules == (ParameterGroup("norm", lr_scale=0.5), ParameterGroup("output", weight_decay=0.0))
    message = message_of(tmp_path, "[[optimizer.groups]]\nmath = 'norm'")
    assert "unknown key optimizer.groups[0].math\n  fix: did you mean match?" in message


def test_sources_are_tables_of_the_file_that_overrides_reach(tmp_path: Path) -> None:
    text = "[[data.sources]]\nname = 'a'\nsource = 'text'\n[[data.sources]]\nname = 'b'\nsource = 'jsonl'"
    config = load_config(write(tmp_path, text), ["--data.sources[1].path=rows/*.jsonl"])
    assert [(name, source.source, source.path) for name, source in config.data.by_name().items()] == [
        ("a", "text", ""),
        ("b", "jsonl", "rows/*.jsonl"),
    ]
    assert load_config(write(tmp_path, to_toml(config))) == config
    assert "unknown key data.sources[0].pth\n  fix: did you mean path?" in message_of(
        tmp_path, "[[data.sources]]\npth = 'x'"
    )


def test_a_home_folder_is_expanded_and_a_byte_order_mark_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[job]\ndump_folder = '~/runs/mine'\n")
    assert load_config(path).job.dump_folder == str(Path.home() / "runs" / "mine")


def test_a_word_that_toml_takes_for_a_number_is_a_word_where_one_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    assert load_config(tmp_path / "run.toml", ["--data.text_field=nan"]).data.text_field == "nan"


@pytest.mark.parametrize(
    "key", ["job.dump_folder", "data.path", "data.sources[0].path", "tokenizer.path", "model.hub_checkpoint"]
)
def test_a_path_with_a_byte_that_is_not_utf8_is_refused_by_name(tmp_path: Path, key: str) -> None:
    text = "[[data.sources]]\nname = 'a'\npath = 'corpus'" if "sources" in key else ""
    for path in (os.fsdecode(b"runs/b\xffd"), os.fsdecode(b'"runs/b\xffd"')):
        message = message_of(tmp_path, text, f"--{key}={path}")
        assert message.startswith(f"--{key} holds bytes that are not UTF-8: ")
        assert r"runs/b\udcffd" in message
        assert "fix: rename the file or folder" in message


def test_a_home_with_a_byte_that_is_not_utf8_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.fsdecode(b"/home/b\xffd"))
    message = message_of(tmp_path, "[job]\ndump_folder = '~/run'")
    assert message.startswith(r"job.dump_folder holds bytes that are not UTF-8: '/home/b\udcffd/run'")


def test_a_config_may_lie_below_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xffd")
    folder.mkdir()
    assert load_config(write(folder, "[training]\nseed = 3")).training.seed == 3
    assert "unknown key training.sed" in message_of(folder, "[training]\nsed = 3")
