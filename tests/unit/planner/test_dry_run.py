"""The real step as one rank of many, without tensors: its memory and messages, and the memory formula beside it."""

import re
from pathlib import Path

import pytest

import train
from models import ARCHITECTURES
from tests.support.deep import deep_rows
from tests.support.runs import write_run
from tests.support.walks import LONGER, walk_all, walk_of_two
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES
from torchtitan_cp.planner import dry_run as dry_run_module
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.dry_run import StageWalk, dry_run
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.fake import StepTracker
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS, Heads
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
    "--model.overrides={dim = 256, n_layers = 2, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 352}",
)
SHARED = "--parallel.ep=2"
HALF_THOUSAND = ("--curriculum.stages[0].seq_len=512", "--training.loss_chunk_tokens=512")
ONE_MICRO_BATCH = "--curriculum.stages[0].global_batch_tokens=16384"

ADAPTERS = ("--lora.rank=8", "--lora.train=['tok_embeddings', 'norm']")
HYBRID = (
    "--model.architecture=qwen3_5",
    "--model.overrides={dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 704}",
    *(f"--model.overrides.linear_{size}" for size in ("key_heads=2", "value_heads=4", "key_dim=64", "value_dim=64")),
    *(f"--curriculum.stages[0].{length}" for length in ("seq_len=4096", "global_batch_tokens=8192")),
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
        ("--parallel.tp=2", "--activation.checkpoint=full", ONE_MICRO_BATCH),
        ("--parallel.tp=2", "--activation.checkpoint=full", "--activation.mlp_tiles=8", ONE_MICRO_BATCH),
        ("--parallel.tp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        EXPERTS,
        (*EXPERTS, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
        (*EXPERTS, "--activation.checkpoint=attention_saved", "--parallel.cp=2"),
        (*EXPERTS, "--activation.checkpoint=selective"),
        (*EXPERTS, "--activation.mlp_tiles=4"),
        (*EXPERTS, "--parallel.tp=2"),
        (*EXPERTS, SHARED),
        (*EXPERTS, SHARED, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
        (*EXPERTS, SHARED, "--activation.checkpoint=selective"),
        (
            *(*EXPERTS, SHARED, "--activation.mlp_tiles=4", "--parallel.cp=2"),
            *("--activation.checkpoint=attention_saved", ONE_MICRO_BATCH),
        ),
        HYBRID,
        (*HYBRID, "--activation.checkpoint=attention_saved"),
        (*HYBRID, "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        (*HYBRID, "--parallel.cp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=full"),
        ("--lora.rank=8",),
        (*ADAPTERS, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
        (*ADAPTERS, "--activation.checkpoint=attention_saved", "--parallel.tp=2"),
        (*ADAPTERS, "--activation.checkpoint=selective", "--training.compute_dtype=bfloat16"),
    ],
    default=[
        ("--activation.checkpoint=full", "--activation.mlp_tiles=8"),
        ("--training.compute_dtype=bfloat16", "--activation.checkpoint=attention_saved"),
        ("--parallel.cp=2", "--context_parallel.strategy=all_to_all", "--activation.checkpoint=full"),
        ("--parallel.tp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=selective"),
        (*EXPERTS, SHARED, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
        HYBRID,
        (*ADAPTERS, "--activation.checkpoint=full", "--training.compute_dtype=bfloat16"),
    ],
)
def test_the_memory_formula_is_within_10_percent_of_the_real_steps_tensors(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    path = write_run(tmp_path)
    walked = walk(path, 2, *LONGER, *overrides)
    (planned,) = plan_config(load_config(path, [*LONGER, *overrides]), make_cluster("cpu", 1))
    assert planned.memory.total == pytest.approx(walked.peak_bytes, rel=0.10)


# Weights in flight outweigh everything else: on 4 ranks, 1,024 tokens a rank.
WIDE = (
    *("--curriculum.stages[0].seq_len=1024", "--curriculum.stages[0].global_batch_tokens=8192"),
    *("--training.compute_dtype=bfloat16", "--activation.checkpoint=full", "--tokenizer.vocab_size=512"),
    "--model.overrides={dim = 2048, n_layers = 6, n_heads = 16, n_kv_heads = 8, head_dim = 128, ffn_dim = 8192}",
)
BASE_IN_NF4 = "--lora.base=nf4"
IN_NF4 = ("--lora.rank=8", BASE_IN_NF4)
WIDE_EXPERTS = (
    *(*WIDE[:-1], "--model.architecture=moe"),
    "--model.overrides={dim = 1024, n_layers = 5, n_heads = 8, n_kv_heads = 4, head_dim = 128, n_experts = 8, "
    "ffn_dim = 4096}",
)


@deep_rows(
    "overrides",
    [
        WIDE,
        (*WIDE, "--curriculum.stages[0].global_batch_tokens=4096"),
        (*WIDE, "--training.compute_dtype=float32"),
        (*WIDE, "--parallel.fsdp_reshard=never"),
        (*WIDE, "--parallel.pp=2"),
        (*WIDE, "--tokenizer.vocab_size=64000"),
        (*WIDE, *IN_NF4),
        (*WIDE, *IN_NF4, "--training.compute_dtype=float32"),
        (*WIDE, *IN_NF4, "--activation.checkpoint=attention_saved", "--activation.mlp_tiles=4", "--parallel.cp=2"),
        WIDE_EXPERTS,
        (*WIDE_EXPERTS, "--parallel.ep=2"),
        (*WIDE_EXPERTS, "--parallel.tp=2"),
    ],
    default=[(*WIDE, "--curriculum.stages[0].global_batch_tokens=4096"), (*WIDE, *IN_NF4)],
)
def test_the_memory_formula_is_within_10_percent_where_weights_outweigh_activations(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    if BASE_IN_NF4 in overrides and not SHARDS_BYTES:
        pytest.skip("FSDP shards bytes from torch 2.13 on")
    path = write_run(tmp_path)
    walked = walk(path, 4, *overrides)
    (planned,) = plan_config(load_config(path, overrides), make_cluster("cpu", 2))
    assert planned.memory.total == pytest.approx(walked.peak_bytes, rel=0.10)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_an_exchange_keeps_nothing_of_the_step_before(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers: list[StepTracker] = []
    monkeypatch.setattr(
        dry_run_module, "StepTracker", lambda device: trackers.append(StepTracker(device)) or trackers[0]
    )
    sizes = "{dim = 256, n_layers = 1, n_heads = 8, n_kv_heads = 8, head_dim = 64, ffn_dim = 704}"
    stage = ("--curriculum.stages[0].seq_len=16384", "--curriculum.stages[0].global_batch_tokens=16384")
    options = (f"--model.overrides={sizes}", f"--context_parallel.strategy={strategy}", "--parallel.cp=8", *stage)
    walk(write_run(tmp_path), 8, *options, "--training.compute_dtype=bfloat16")
    # The last operator to run is the attention's backward.
    *_, (working_bytes, _) = trackers[0].operator_costs.values()
    # Beside the formula's tensors there are a kernel's own results; what a step before left is a sixth more.
    assert working_bytes < 1.25 * STRATEGY_COSTS[strategy].working_bytes(2048, 8, 1, Heads(8, 8, 64))


@pytest.mark.parametrize(
    "overrides", [("--parallel.tp=2",), ("--optimizer.name=muon",), (*EXPERTS, "--optimizer.name=muon")]
)
def test_weights_and_optimizer_state_are_the_shards_of_the_plan(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    path = write_run(tmp_path)
    stage = ("--curriculum.stages[0].seq_len=1024", "--curriculum.stages[0].global_batch_tokens=4096")
    options = (*LONGER, *overrides, *stage)
    walked = walk(path, 4, *options)
    config = load_config(path, options)
    (planned,) = plan_config(config, make_cluster("cpu", 2))
    # 257 rows of the vocabulary do not divide by 4, and a shard is as long as the longest.
    assert walked.by_kind["weights"] == pytest.approx(planned.memory.by_kind["weights"], rel=2e-2)
    assert walked.by_kind["optimizer"] == pytest.approx(planned.memory.by_kind["optimizer"], rel=2e-2)


@deep_rows(
    ("overrides", "passes"),
    [
        ((), 4),
        (("--activation.checkpoint=full", "--training.compute_dtype=bfloat16"), 6),
        (("--activation.checkpoint=attention_saved", "--parallel.cp=2", "--activation.mlp_tiles=4"), 7.5),
    ],
    default=[(("--activation.checkpoint=full", "--training.compute_dtype=bfloat16"), 6)],
)
def test_the_bytes_sent_to_experts_are_those_of_the_formula(
    tmp_path: Path, overrides: tuple[str, ...], passes: float
) -> None:
    path = write_run(tmp_path)
    options = (*EXPERTS, *overrides, "--parallel.ep=4", *HALF_THOUSAND)
    options = (*options, "--curriculum.stages[0].global_batch_tokens=4096")
    walked = walk(path, 4, *options)
    (planned,) = plan_config(load_config(path, options), make_cluster("cpu", 2))
    # Counts are exchanged too, an int64 for each tile and expert.
    tiles = planned.config.activation.mlp_tiles
    counted = {
        m: times for m, times in walked.messages.items() if m.operation in ("alltoall_base", "all_to_all_single")
    }
    rows = sum(m.size_bytes * times for m, times in counted.items() if m.size_bytes > 8 * 8)
    assert rows * planned.stage.micro_batches == planned.dispatch_bytes * walked.micro_batches
    # L T K E, 512 tokens a rank (in tiles), 2 experts a token.
    one = 2 * planned.tokens * 2 * 256 * planned.element_bytes
    assert planned.dispatch_bytes == passes * one * planned.stage.micro_batches
    assert {m.group for m in counted} == {"4 ranks: 0, 1 ... 3"}
    assert (
        tiles * passes == sum(times for m, times in counted.items() if m.size_bytes > 8 * 8) / 2 / walked.micro_batches
    )


def test_shared_experts_are_gathered_less_and_stored_as_before(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    register(ARCHITECTURES)
    options = ["--model.architecture=moe", "--model.flavor=qwen3-30B-A3B", "--model.overrides={}"]
    options += ["--activation.checkpoint=full", "--curriculum.stages[0].global_batch_tokens=4096"]
    configs = (load_config(path, [*options, f"--parallel.ep={ep}"]) for ep in (1, 8))
    alone, shared = (plan_config(config, make_cluster("h100-80g", 2))[0] for config in configs)
    # 48 layers of 128 experts, three matrices of 2,048 x 768.
    assert alone.counts.experts == 128 * 3 * 2048 * 768
    assert alone.counts.block - shared.gathered_block == alone.counts.experts * 7 / 8
    for kind in ("weights", "optimizer"):
        assert shared.memory.by_kind[kind] == alone.memory.by_kind[kind]
    assert shared.memory.total < alone.memory.total - alone.counts.experts * 2 * 7 / 8
    assert shared.seconds["expert-parallel messages"] > 0 == alone.seconds["expert-parallel messages"]


def test_the_rings_messages_are_those_of_the_planner(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    options = ["--parallel.cp=4", "--context_parallel.strategy=ring", *HALF_THOUSAND]
    (planned,) = plan_config(load_config(path, options), make_cluster("cpu", 2))
    by_rank = [sent(walk(path, 4, *options, rank=rank), "send") for rank in range(4)]
    assert max(by_rank) == planned.volumes["ring"].step_bytes


@pytest.mark.parametrize(
    ("overrides", "times"),
    [((), 1), (("--training.reduce_dtype=bfloat16",), 2), (("--parallel.pp=2", "--parallel.dp_shard=1"), 1)],
)
def test_replicas_sum_gradients_once_a_step_and_in_bf16_in_each_micro_batch(
    tmp_path: Path, overrides: tuple[str, ...], times: int
) -> None:
    options = ("--parallel.dp_replicate=2", "--curriculum.stages[0].global_batch_tokens=16384", *HALF_THOUSAND)
    walked = walk(write_run(tmp_path), 4, *options, *overrides)
    replicas = "2 ranks: 0, 1" if "--parallel.pp=2" in overrides else "2 ranks: 0, 2"
    summed = [number for message, number in walked.messages.items() if message[:2] == ("allreduce", replicas)]
    # Equal blocks are one kind of message, and what is outside them another; a pipeline rank has one block of the two.
    assert walked.micro_batches == (3 if "--parallel.pp=2" in overrides else 2)
    assert sorted(summed) == ([1, 1] if "--parallel.pp=2" in overrides else [times, 2 * times])


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
    assert "messages of stage 128 in 1 of 1 micro-batches" in " ".join(printed.split())
    assert "reduce_scatter" in printed


def test_a_dry_run_says_which_stage_it_walks_and_how_far_a_long_step_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run_module, "LINE_SECONDS", -1.0)
    with caplog.at_level("INFO", "torchtitan_cp.planner"):
        walked = walk(write_run(tmp_path), 2, "--curriculum.stages[0].global_batch_tokens=1024")
    assert walked.micro_batches == 2
    first, begins, *forwards, done = caplog.messages
    assert first == "one step of each stage, 1 in all, as rank 0 of 2, on fake tensors"
    assert begins == "stage 1 (128): begins"
    assert forwards == ["stage 1 (128): forward 1 of 2", "stage 1 (128): forward 2 of 2"]
    assert re.fullmatch(r"stage 1 \(128\): done in \d+ s, [\d.]+ [KMG]iB at the peak", done)


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
    remembered = walk(path, 8, *options)
    # A key of its own for each attention, so that none is remembered.
    monkeypatch.setattr("torchtitan_cp.planner.fake._as_key", lambda leaf: object())
    assert walk(path, 8, *options) == remembered


@pytest.mark.deep
def test_a_stage_takes_the_same_when_nothing_was_walked_before_it(tmp_path: Path) -> None:
    """Nor are DTensor's trials on whole tensors counted, nor what a pipeline holds from a stage that is over."""
    config, _ = walk_of_two(tmp_path)
    stages = resolve_run(config, 4, sized_model_args(config)).stages
    alone = [walk_all(config, [stage])[0] for stage in stages]
    assert walk_all(config, [stages[0], *stages, stages[0]]) == [alone[0], *alone, alone[0]]


def test_a_rank_outside_the_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no rank 4 among 4"):
        walk(write_run(tmp_path), 4, rank=4)


def test_a_dry_run_takes_and_refuses_what_a_run_does_with_the_compiler(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert walk(path, 2, "--parallel.tp=2", "--parallel.async_tp=true", "--compile.enable=true").peak_bytes
    assert walk(path, 2, *EXPERTS, "--parallel.ep=2", "--compile.enable=true").peak_bytes
    with pytest.raises(ConfigError, match="splits the backward of a block, which a compiled block cannot"):
        walk(path, 2, "--parallel.pp=2", "--parallel.pp_schedule=zbv_zero_bubble", "--compile.enable=true")
