"""Stopping and going on gives the losses of going straight; what is damaged or foreign is not taken."""

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.curricula import TWO_STAGES
from tests.support.deep import deep_rows
from tests.support.inject import Inject, train_with_fault
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import TINY, losses, prepared, train, write_run
from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, checksum, verify_checkpoint
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.config.load import load_config, to_toml
from torchtitan_cp.config.run_folder import RUN_CONFIG
from torchtitan_cp.training import trainer


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("resume"), TWO_STAGES)


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], RankPool], run_toml: Path) -> list[float]:
    return losses(ranks(2)(train, run_toml, f"--job.dump_folder={run_toml.parent / 'straight'}")[0])


def stopped_copy(run_toml: Path, name: str, keep_up_to: int) -> Path:
    """A copy of the straight run as if it had died after a checkpoint."""
    folder = run_toml.parent / name
    shutil.copytree(run_toml.parent / "straight", folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > keep_up_to:
            shutil.rmtree(path)
    return folder


def test_checkpoints_stand_at_every_interval_and_stage_end(run_toml: Path, straight: list[float]) -> None:
    names = sorted(path.name for path in (run_toml.parent / "straight" / "checkpoints").iterdir())
    assert names == ["step-10", "step-14", "step-5", "step-8"]
    assert len(straight) == 14


@deep_rows("stop", [5, 8, 10], default=[5, 10])
def test_on_the_same_ranks_a_resumed_run_is_bit_for_bit_the_straight_one(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], stop: int
) -> None:
    folder = stopped_copy(run_toml, f"stop-{stop}", stop)
    lines = ranks(2)(train, run_toml, f"--job.dump_folder={folder}")[0]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert losses(lines) == straight


@pytest.mark.parametrize(
    ("size", "cp", "degrees"),
    [
        pytest.param(2, 1, [], marks=pytest.mark.deep),
        pytest.param(1, 1, [], marks=pytest.mark.deep),
        pytest.param(4, 2, [], marks=pytest.mark.deep),
        pytest.param(4, 2, ["--parallel.tp=2"], marks=pytest.mark.deep),
        pytest.param(2, 1, ["--parallel.pp=2"], marks=pytest.mark.deep),
        pytest.param(4, 2, ["--parallel.dp_replicate=2"], marks=pytest.mark.deep),
    ],
)
def test_on_other_ranks_a_resumed_run_stays_within_the_tolerance(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], size: int, cp: int, degrees: list[str]
) -> None:
    """Stopped at CP 2 in the second stage; goes on on other ranks, stops, and ends where it began."""
    name = f"other-{size}-{cp}-{''.join(degrees)}"
    folder = f"--job.dump_folder={stopped_copy(run_toml, name, 10)}"
    away = [f"--curriculum.stages[1].cp={cp}", "--checkpoint.interval=4", *degrees]
    lines = ranks(size)(train, run_toml, folder, *away)[0]
    assert losses(lines) == pytest.approx(straight, rel=1e-4)
    shutil.rmtree(run_toml.parent / name / "checkpoints" / "step-14")
    lines = ranks(2)(train, run_toml, folder)[0]
    assert losses(lines) == pytest.approx(straight, rel=1e-4)


def messages_of_resuming(path: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """On a rank: what a run's resume warns of, and what it says of changed settings."""
    trainer, records = prepared(path, *overrides), list[logging.LogRecord]()
    logger, handler = logging.getLogger("torchtitan_cp.training.resume"), logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer.resume()
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    warned = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    return warned, [said for record in records if "other settings" in (said := record.getMessage())]


@pytest.mark.parametrize(
    ("stop", "change", "said"),
    [
        (10, "global_batch_tokens=1024", "stage 2 reads its text differently .*: global_batch_tokens 512 -> 1024"),
        (10, "data.packing='best_fit'", "stage 2 reads its text differently .*: packing concat -> best_fit"),
        (10, "rope={theta = 5e6}", r"stage 2 goes on with another rope: theta \d+\.0 -> 5000000.0"),
        (10, "cp=1", None),
        (10, "cp=-1", None),
        (8, "global_batch_tokens=1024", None),
    ],
)
def test_changed_settings_are_named_and_another_way_to_read_text_is_warned_of_in_the_middle_of_a_stage_only(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], stop: int, change: str, said: str | None
) -> None:
    folder = stopped_copy(run_toml, f"reads-{stop}-{change}", stop)
    overrides = (f"--job.dump_folder={folder}", f"--curriculum.stages[1].{change}")
    (warned, changed), (_, on_rank_1) = ranks(2)(messages_of_resuming, run_toml, *overrides)
    key, _, value = change.partition("=")
    if value == "-1":  # as before
        assert changed == []
    else:
        [line] = changed
        assert re.fullmatch(rf"resumed with other settings: curriculum\.stages\[1\]\.{key}\S* \S+ -> \S+", line)
    assert on_rank_1 == []
    if said is None:
        assert warned == []
    else:
        [warning] = warned
        assert re.search(said, warning)


def test_an_older_checkpoint_keeps_the_rope_that_it_was_trained_with(run_toml: Path, straight: list[float]) -> None:
    folder = stopped_copy(run_toml, "rope", 10)
    before = open_saved_model(folder).stage.rope
    config = load_config(folder / RUN_CONFIG, ["--curriculum.stages[1].rope={theta = 5e6}"])
    (folder / RUN_CONFIG).write_text(to_toml(config))
    assert open_saved_model(folder).stage.rope == before
    assert before.theta != 5e6  # type: ignore[union-attr]


def test_a_rope_that_was_the_models_own_is_an_older_one_too(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "own-rope", 10)
    file = folder / "checkpoints" / "step-10" / "progress.json"
    progress = json.loads(file.read_text())
    file.write_text(json.dumps(progress | {"ropes": progress["ropes"] | {"1": None}}))
    manifest = json.loads(file.with_name(MANIFEST_FILE).read_text())
    manifest["files"][file.name] = checksum(file)
    file.with_name(MANIFEST_FILE).write_text(json.dumps(manifest))
    opened = open_saved_model(folder)
    assert opened.stage.rope is None
    assert opened.config.curriculum.stages[1] == opened.stage, "evaluate finds the stage there"
    [warning], _ = ranks(2)(messages_of_resuming, run_toml, f"--job.dump_folder={folder}")[0]
    assert warning.startswith("stage 2 goes on with another rope: the model's own -> {'theta'")


def end_of_first_stage(path: Path, *overrides: str) -> dict[str, int]:
    """On a rank: what the second stage counts as read before it, after a resume at the end of the first."""
    trainer = prepared(path, *overrides)
    trainer.resume()
    trainer._leave_stage()
    return trainer.progress.source_tokens


@pytest.mark.parametrize("change", ["global_batch_tokens=1024", "seq_len=64", "steps=7"])
def test_a_finished_stage_that_is_changed_moves_no_text(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], change: str
) -> None:
    folder = stopped_copy(run_toml, f"finished-{change.partition('=')[0]}", 8)
    overrides = (f"--job.dump_folder={folder}", f"--curriculum.stages[0].{change}")
    assert ranks(2)(end_of_first_stage, run_toml, *overrides)[0] == {"corpus": 8 * 512}


def test_a_finished_stage_that_is_lengthened_and_shortened_again_counts_what_it_read(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "lengthened", 8)
    longer = (f"--job.dump_folder={folder}", "--curriculum.stages[0].steps=12", "--checkpoint.interval=10")
    ranks(2)(train, run_toml, *longer)
    for path in (folder / "checkpoints").iterdir():
        if path.name != "step-10":
            shutil.rmtree(path)
    assert ranks(2)(end_of_first_stage, run_toml, *longer[:1], "--curriculum.stages[0].steps=9")[0] == {"corpus": 5120}


def prepared_without_corpus(path: Path, *overrides: str) -> None:
    """On a rank: begin as a run does, which may not come to its corpus."""
    with patch.object(trainer, "prepare_corpus", side_effect=AssertionError("the corpus would be prepared")):
        prepared(path, *overrides)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--model.overrides.ffn_dim=64", r"was written with model \{'ffn_dim': 96\}, and the config now gives"),
        ("--training.seed=9", "was written with seed "),
        ("--optimizer.name=muon", "was written with optimizer adamw, state in float32"),
        ("--optimizer.lr=1e-4", "the corpus would be prepared"),
    ],
)
def test_a_checkpoint_of_another_model_seed_or_optimizer_is_refused_before_the_corpus_is_prepared(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], change: str, says: str
) -> None:
    folder = stopped_copy(run_toml, f"other-{change.partition('=')[0]}", 8)
    with pytest.raises(RankFailure, match=says):
        ranks(1)(prepared_without_corpus, run_toml, f"--job.dump_folder={folder}", change)


def test_a_run_without_checkpoints_does_not_begin_anew_in_the_folder_of_one_that_has_some(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "anew", 10)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RankFailure, match=r"holds checkpoints, and checkpoint\.enable = false would begin anew"):
        ranks(1)(train, run_toml, f"--job.dump_folder={folder}", "--checkpoint.enable=false")
    assert (folder / "metrics.jsonl").read_bytes() == before


def connections_of_saves(path: Path, *overrides: str) -> list[bool]:
    """On a rank: whether they are there before training and after it."""
    trainer, found = prepared(path, *overrides), list[bool]()
    train_stages = trainer._train

    def look_and_train() -> None:
        found.append(trainer.checkpoints._background is not None)
        train_stages()

    trainer._train = look_and_train  # type: ignore[method-assign]
    trainer.run()
    return [*found, trainer.checkpoints._background is not None]


def test_the_ranks_connect_for_saves_before_the_first_step(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "connected", 10)
    assert ranks(2)(connections_of_saves, run_toml, f"--job.dump_folder={folder}") == [[True, False]] * 2


def test_a_stage_cut_to_fewer_steps_than_it_took_ends_there_and_the_next_goes_on(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "shortened", 5)
    fewer = ("--curriculum.stages[0].steps=3", f"--job.dump_folder={folder}")
    [warning], _ = ranks(2)(messages_of_resuming, run_toml, *fewer)[0]
    assert warning == "stage 1 has taken 5 steps and the config gives it 3: it ends here"
    lines = ranks(2)(train, run_toml, *fewer)[0]
    assert [line["step"] for line in lines] == list(range(1, 5 + 6 + 1))


def test_another_order_of_the_data_is_warned_of(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    """Even where a stage begins: the place in each source is one in the order before."""
    folder = stopped_copy(run_toml, "order", 8)
    [warning], _ = ranks(2)(messages_of_resuming, run_toml, f"--job.dump_folder={folder}", "--data.order=related")[0]
    assert (
        warning == "data.order shuffled -> related: the data order changes from here, and some text may be read twice"
    )


@deep_rows("damage", ["partial", "no progress", "cut", "gone", "flipped"], default=["cut"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_writes_that_anew(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], damage: str
) -> None:
    folder = stopped_copy(run_toml, f"damaged-{damage}", 10)
    newest = folder / "checkpoints" / "step-10"
    part = next(newest.glob("__1_*.distcp"))
    if damage == "partial":
        newest.rename(newest.with_name("step-10.partial"))
    elif damage == "no progress":
        (newest / "progress.json").unlink()
    elif damage == "cut":
        os.truncate(part, 100)
    elif damage == "gone":
        part.unlink()
    else:
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    assert losses(ranks(2)(train, run_toml, f"--job.dump_folder={folder}")[0]) == straight
    assert verify_checkpoint(newest) == []
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-10", "step-14", "step-5", "step-8"]


def test_a_finished_run_takes_no_step_and_writes_nothing(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = stopped_copy(run_toml, "finished", 14)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert losses(ranks(2)(train, run_toml, f"--job.dump_folder={folder}")[0]) == straight
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_newest_checkpoints_and_the_ends_of_stages_are_kept(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    folder = run_toml.parent / "kept"
    ranks(2)(train, run_toml, f"--job.dump_folder={folder}", "--checkpoint.keep=2", "--checkpoint.interval=3")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-12", "step-14", "step-8"]


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("--model.overrides.n_layers=1", "model .* and the config now gives"),
        ("--optimizer.name=muon", "optimizer .* and the config now gives"),
        ("--training.seed=5", "seed .* and the config now gives"),
        (
            "--data.validation_fraction=0.5",
            "other tokens of corpus than the config now gives: data.validation_fraction 0.25 -> 0.5\n",
        ),
    ],
)
def test_a_checkpoint_of_another_model_seed_or_corpus_is_refused(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float], override: str, what: str
) -> None:
    folder = run_toml.parent / "straight"
    with pytest.raises(RankFailure, match=rf"step-14 was written with {what}"):
        ranks(2)(train, run_toml, f"--job.dump_folder={folder}", override)


def test_a_checkpoint_of_a_corpus_that_has_changed_is_refused_and_says_so(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    file = run_toml.parent / "corpus" / "uuid.py"
    text = file.read_text()
    said = "other tokens of corpus than the config now gives: the settings are those of the last start, so the text"
    try:
        file.write_text(text + "more = True\n")
        with pytest.raises(RankFailure, match=said):
            ranks(2)(train, run_toml, f"--job.dump_folder={run_toml.parent / 'straight'}")
    finally:
        file.write_text(text)


def test_the_resolved_config_stands_beside_the_logs_and_trains_the_same(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    resolved = run_toml.parent / "straight" / "config.toml"
    folder = stopped_copy(run_toml, "from-resolved", 5)
    assert losses(ranks(2)(train, resolved, f"--job.dump_folder={folder}")[0]) == straight


def test_a_line_of_metrics_has_what_scripts_rely_on(run_toml: Path, straight: list[float]) -> None:
    text = (run_toml.parent / "straight" / "metrics.jsonl").read_text()
    first, last = (json.loads(text.splitlines()[i]) for i in (0, -1))
    wanted = {"step", "stage", "seq_len", "cp", "tokens", "loss", "grad_norm", "lr", "tokens_per_second"}
    assert wanted | {"peak_memory_bytes"} <= first.keys()
    assert (first["step"], first["seq_len"], first["cp"], first["tokens"]) == (1, 128, 1, 512)
    assert (last["step"], last["seq_len"], last["cp"], last["tokens"]) == (14, 256, 2, 14 * 512)


def test_a_resumed_run_compares_its_steps_with_those_before_it_stopped(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """A spike in the first step after a resume is found, as the checkpoint has the numbers of healthy steps."""
    text = TINY.replace("global_batch_tokens = 512", "global_batch_tokens = 256")
    path, fault = write_run(tmp_path, text), Inject(step=18, kind="spike")
    settings = ("--health.spike_threshold=200",)
    ranks(1)(train, path, "--curriculum.stages[0].steps=17", *settings)
    lines = ranks(1)(train_with_fault, fault, path, "--curriculum.stages[0].steps=18", *settings)[0]
    assert [line["step"] for line in lines if line["spikes"]] == [18]


def train_deterministically(path: Path, folder: str) -> list[float]:
    try:
        return losses(train(path, folder, "--training.deterministic=true", "--checkpoint.enable=false"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.deep
def test_deterministic_kernels_give_the_same_bits_twice(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: list[float]
) -> None:
    runs = [
        ranks(2)(train_deterministically, run_toml, f"--job.dump_folder={run_toml.parent}/bits-{number}")[0]
        for number in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] == pytest.approx(straight, rel=1e-5)


def train_as_a_node_of_its_own(paths: list[Path]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(socket, "gethostname", lambda: f"node {dist.get_rank()}")
        train(paths[dist.get_rank()])


def test_nodes_that_read_other_tokens_are_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    paths = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        paths.append(write_run(tmp_path / name))
    (tmp_path / "other" / "corpus" / "ast.py").unlink()
    differ = (
        "(?s)the ranks differ in the tokens of data.path and data.cache_folder: tokens: "
        "rank 0 on node 0 has version 1, rank 1 on node 1 has version 2\\n.*start every node from the same files"
    )
    with pytest.raises(RankFailure, match=differ):
        ranks(2)(train_as_a_node_of_its_own, paths)
