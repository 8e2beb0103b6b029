"""The real step as one rank of many, without tensors: its memory and messages, and the memory formula beside it."""

from pathlib import Path

import pytest

import train
from models import ARCHITECTURES
from tests.support.deep import deep_rows
from tests.support.runs import write_run
from tests.support.walks import LONGER, walk_all, walk_of_two
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.dry_run import StageWalk, dry_run
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.parameters import model_args_of
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run


def walk(path: Path, ranks: int, *overrides: str, rank: int = 0) -> StageWalk:
    register(ARCHITECTURES)
    return dry_run(load_config(path, overrides), ranks, rank)[0]


def sent(walked: StageWalk, operation: str) -> int:
    return sum(m.size_bytes * times for m, times in walked.messages.items() if m.operation == operation)


# Small enough for a test, and a layer's tensors stand out.
EXPERTS = (
    "--model.architecture=moe",
    "--model.overrides={dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 352}",
)

HYBRID = (
    "--model.architecture=qwen3_5",
    "--model.overrides={dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 704}",
    *(f"--model.overrides.linear_{size}" for size in ("key_heads=2", "value_heads=4", "key_dim=64", "value_dim=64")),
)


@deep_rows(
    "overrides",
    [
        (),
        ("--activation.checkpoint=full",),
        ("--activation.checkpoint=attention_saved",),
        ("--activation.checkpoint=selective",),
        ("--activation.mlp_tiles=8",),
        ("--activation.checkpoint=full", "--activation.mlp_tiles=8"),
        ("--activation.checkpoint=attention_saved", "--activation.mlp_tiles=8"),
        ("--activation.checkpoint=selective", "--activation.mlp_tiles=8"),
        ("--training.compute_dtype=bfloat16", "--activation.checkpoint=attention_saved"),
        ("--parallel.cp=2", "--context_parallel.strategy=all_gather", "--activation.checkpoint=full"),
        ("--parallel.cp=2", "--context_parallel.strategy=ring"),
        ("--parallel.cp=2", "--context_parallel.strategy=all_to_all", "--activation.checkpoint=full"),
        ("--parallel.tp=2",),
        ("--parallel.tp=2", "--activation.checkpoint=full"),
        ("--parallel.tp=2", "--activation.checkpoint=full", "--activation.mlp_tiles=8"),
        ("--parallel.tp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        EXPERTS,
        (*EXPERTS, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
        (*EXPERTS, "--activation.checkpoint=attention_saved", "--parallel.cp=2"),
        (*EXPERTS, "--activation.checkpoint=selective"),
        (*EXPERTS, "--activation.mlp_tiles=4"),
        HYBRID,
        (*HYBRID, "--activation.checkpoint=attention_saved"),
        (*HYBRID, "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        (*HYBRID, "--parallel.cp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=full"),
    ],
    default=[
        ("--activation.checkpoint=full", "--activation.mlp_tiles=8"),
        ("--training.compute_dtype=bfloat16", "--activation.checkpoint=attention_saved"),
        ("--parallel.cp=2", "--context_parallel.strategy=all_to_all", "--activation.checkpoint=full"),
        ("--parallel.tp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        (*EXPERTS, "--activation.mlp_tiles=4"),
        (*HYBRID, "--parallel.cp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=full"),
    ],
)
def test_the_memory_formula_is_within_10_percent_of_the_real_steps_tensors(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    path = write_run(tmp_path)
    walked = walk(path, 2, *LONGER, *overrides)
    (planned,) = plan_config(load_config(path, [*LONGER, *overrides]), make_cluster("cpu", 1))
    assert planned.memory.total == pytest.approx(walked.peak_bytes, rel=0.10)


@pytest.mark.parametrize(
    "overrides", [("--parallel.tp=2",), ("--optimizer.name=muon",), (*EXPERTS, "--optimizer.name=muon")]
)
def test_weights_and_optimizer_state_are_the_shards_of_the_plan(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    path = write_run(tmp_path)
    options = (*LONGER, *overrides, "--curriculum.stages[0].global_batch_tokens=65536")
    walked = walk(path, 4, *options)
    config = load_config(path, options)
    (planned,) = plan_config(config, make_cluster("cpu", 2))
    # 257 rows of the vocabulary do not divide by 4, and a shard is as long as the longest.
    assert walked.by_kind["weights"] == pytest.approx(planned.memory.by_kind["weights"], rel=2e-2)
    assert walked.by_kind["optimizer"] == pytest.approx(planned.memory.by_kind["optimizer"], rel=2e-2)


def test_the_rings_messages_are_those_of_the_planner(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    options = ["--parallel.cp=4", "--context_parallel.strategy=ring", "--curriculum.stages[0].seq_len=512"]
    (planned,) = plan_config(load_config(path, options), make_cluster("cpu", 2))
    by_rank = [sent(walk(path, 4, *options, rank=rank), "send") for rank in range(4)]
    assert max(by_rank) == planned.volumes["ring"].step_bytes


def test_of_a_pipeline_a_rank_sends_the_messages_of_its_own_layers(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    options = ["--context_parallel.strategy=ring", "--curriculum.stages[0].seq_len=512", "--curriculum.stages[0].cp=4"]
    options.append("--curriculum.stages[0].global_batch_tokens=4096")
    plans = (load_config(path, [*options, f"--parallel.pp={pp}"]) for pp in (1, 2))
    whole, halved = (plan_config(config, make_cluster("cpu", 4))[0].volumes for config in plans)
    # Half as many ranks share the sequences of a step, and each has half of the layers.
    assert halved["ring"].step_bytes == whole["ring"].step_bytes
    assert halved["ring"].layer_bytes == whole["ring"].layer_bytes


def test_a_pipeline_rank_of_a_large_job_is_walked_with_its_stages_layers_alone(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    options = (
        "--parallel.pp=2", "--parallel.tp=2", "--parallel.cp=8", "--curriculum.stages[0].seq_len=1024",
        "--curriculum.stages[0].global_batch_tokens=32768",
    )  # fmt: skip
    first, last = (walk(path, 512, *options, rank=rank) for rank in (0, 256))
    groups = {message.group for message in first.messages}
    assert "8 ranks: 0, 2 ... 14" in groups
    assert "128 ranks: 0, 2 ... 254" in groups
    assert "2 ranks: 0, 256" in groups
    # The second pipeline rank has the output where the first has the embedding, beside a layer each.
    assert last.by_kind["weights"] == pytest.approx(first.by_kind["weights"], rel=0.05)
    assert first.micro_batches == 2


def test_the_command_prints_memory_and_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(write_run(tmp_path)), "--dry-run", "--world-size", "4", "--rank", "3"]) == 0
    printed = capsys.readouterr().out
    assert "rank 3 of 4, GiB at the peak" in printed
    assert "messages of stage 128" in printed
    assert "reduce_scatter" in printed


def test_a_step_too_small_for_the_ranks_is_walked_with_what_they_can_share_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = "--curriculum.stages[0].global_batch_tokens"
    path = write_run(tmp_path)
    walked = walk(path, 6, f"{tokens}=1280")
    assert walked.stage.global_batch_tokens == 1536  # 12 sequences of 128
    [record] = [record for record in caplog.records if "cannot share" in record.message]
    assert "global_batch_tokens = 1280" in record.message
    assert "1536 tokens" in record.message
    caplog.clear()
    assert walk(path, 6, f"{tokens}=1536").messages == walked.messages
    assert not [record for record in caplog.records if "cannot share" in record.message]
    with pytest.raises(ConfigError, match=r"cp = 4 does not divide dp_shard x cp = 6"):
        walk(path, 6, "--curriculum.stages[0].cp=4")


def test_what_is_remembered_counts_as_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path)
    options = ("--parallel.cp=4", "--parallel.tp=2", "--context_parallel.strategy=hybrid",
               "--context_parallel.all_to_all_ranks=2", "--activation.checkpoint=full")  # fmt: skip
    remembered = walk(path, 8, *LONGER, *options)
    # A key of its own for each attention, so that none is remembered.
    monkeypatch.setattr("torchtitan_cp.planner.fake._as_key", lambda leaf: object())
    assert walk(path, 8, *LONGER, *options) == remembered


def test_a_stage_takes_the_same_when_nothing_was_walked_before_it(tmp_path: Path) -> None:
    """Nor are DTensor's trials on whole tensors counted, nor what a pipeline holds from a stage that is over."""
    config, _ = walk_of_two(tmp_path)
    stages = resolve_run(config, 4, model_args_of(config)).stages
    alone = [walk_all(config, [stage])[0] for stage in stages]
    assert walk_all(config, [stages[0], *stages, stages[0]]) == [alone[0], *alone, alone[0]]


def test_a_rank_outside_the_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no rank 4 among 4"):
        walk(write_run(tmp_path), 4, rank=4)
