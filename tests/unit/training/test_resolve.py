"""The one place that decides whether a run may be: config and ranks in, a resolved run or an error out."""

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from models import ARCHITECTURES
from tests.support.huggingface_families import FAMILIES
from tests.support.runs import EXPERTS, TINY, write_run
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import ResolvedRun, doctor_config, resolve_run


def resolve(path: Path, ranks: int, *overrides: str, device: str = "cpu") -> ResolvedRun:
    register(ARCHITECTURES)
    return resolve_run(load_config(path, overrides), ranks, device=device)


BATCH = "--curriculum.stages[0].global_batch_tokens"
FLOAT8 = ("--context_parallel.strategy=all_to_all", "--context_parallel.kv_transfer=float8")
PIPELINE = ("--parallel.pp=3", "--model.overrides.n_layers=6", f"{BATCH}=1536")


def test_a_run_has_the_degrees_of_each_stage_and_the_sizes_of_its_model(tmp_path: Path) -> None:
    run = resolve(write_run(tmp_path), 6, *PIPELINE, "--curriculum.stages[0].cp=2")
    [stage] = run.stages
    assert stage.degrees == Degrees(pp=3, dp_replicate=1, dp_shard=1, cp=2, tp=1)
    assert (stage.pp, stage.cp, stage.dp) == (3, 2, 1)
    assert run.model_args.n_layers == 6
    assert run.config_of(stage).parallel.pp == 3


@pytest.mark.parametrize(
    ("overrides", "ranks", "wanted"),
    [
        (("--parallel.cp=8",), 8, {0: "all_to_all", 20: "ring"}),
        (("--parallel.cp=8", "--parallel.tp=2"), 16, {0: "ring", 20: "ring"}),  # 4 heads of each kind are left
        (("--parallel.cp=8", "--context_parallel.kv_transfer=float8"), 8, {0: "ring", 20: "ring"}),
        (("--parallel.cp=8", "--context_parallel.strategy=hybrid"), 8, {0: "hybrid", 20: "hybrid"}),
        (("--parallel.cp=1", "--context_parallel.strategy=hybrid"), 8, {0: "ring", 20: "ring"}),
        (
            ("--curriculum.stages[0].cp=8", "--curriculum.stages[0].strategy=all_gather"),
            8,
            {0: "all_gather", 20: "all_gather"},
        ),
    ],
)
def test_a_stage_has_the_exchange_of_the_layers_with_each_window(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, wanted: dict[int, str]
) -> None:
    heads = ("--model.overrides.n_heads=8", "--model.overrides.n_kv_heads=8", "--model.overrides.windows=[20, 0]")
    [stage] = resolve(write_run(tmp_path), ranks, *heads, f"{BATCH}=4096", *overrides).stages
    assert stage.strategies == wanted


def test_windows_without_a_layer_that_sees_all_have_an_exchange_for_none(tmp_path: Path) -> None:
    run = resolve(write_run(tmp_path), 2, "--model.overrides.windows=[20]", "--parallel.cp=2")
    assert run.stages[0].strategies == {0: "ring", 20: "ring"}


@pytest.mark.parametrize(
    ("overrides", "ranks", "wanted"),
    [
        ((), 4, "3 does not divide them"),
        (
            ("--model.overrides.n_layers=2",),
            6,
            "a pipeline of 3 ranks x 1 pipeline stages is longer than the model's 2 layers",
        ),
        ((f"{BATCH}=256",), 6, "makes 1 micro-batches, which 1f1b cannot assign to 3 pipeline ranks"),
        (("--parallel.pp_stages_per_rank=2",), 6, "and 1f1b takes 1"),
        (("--parallel.dp_shard=1", "--parallel.tp=4"), 12, "parallel.tp = 4 does not divide the model's n_kv_heads"),
        (("--parallel.cp=2", *FLOAT8), 6, "does not cover"),
    ],
)
def test_every_rule_on_a_pipeline_of_three_is_reached_from_here(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, wanted: str
) -> None:
    with pytest.raises((ConfigError, ContextParallelError), match=wanted):
        resolve(write_run(tmp_path), ranks, *PIPELINE, *overrides)


CHAT = ("--data.source=python-docstrings", "--data.path=", "--tokenizer.kind=bytes")


def test_conversations_may_be_as_long_as_the_longest_stage_and_are_packed_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run = resolve(path, 1, *CHAT)
    assert run.config.data.max_document == run.longest
    assert (run.stages[0].data.packing, run.stages[0].data.document_mask) == ("best_fit", True)
    assert resolve(path, 1, *CHAT, "--data.max_document=50").config.data.max_document == 50
    longer = f"--data.min_document={run.longest + 1}"
    assert resolve(path, 1, longer)
    limited = rf"min_document = {run.longest + 1} is more than the longest stage, {run.longest} tokens"
    with pytest.raises(ConfigError, match=limited):
        resolve(path, 1, *CHAT, longer)
    assert resolve(path, 1).config.data.max_document == 0
    sources = '--data.sources=[{name = "a", source = "jsonl", path = "x", messages_field = "m"}, {name = "b"}]'
    alone = ("--data.source=python-stdlib", "--data.path=", "--data.validation_fraction=0.02")
    [chat, text] = resolve(path, 1, *alone, sources).config.data.sources
    assert (chat.max_document, text.max_document) == (run.longest, 0)


def test_a_stage_longer_than_a_table_of_positions_is_refused_and_a_longer_table_is_the_way_out(tmp_path: Path) -> None:
    config, path = tmp_path / "config.json", write_run(tmp_path)
    config.write_text(json.dumps(FAMILIES["GPT-2"] | {"max_position_embeddings": 100}))
    longer = "--curriculum.stages=[{seq_len = 128, steps = 1, global_batch_tokens = 128}]"
    model = [
        longer,
        "--model.architecture=huggingface",
        "--model.flavor=",
        f"--model.config={config}",
        "--model.overrides={}",
    ]
    wanted = r"stages\[0\]\.seq_len = 128 is longer than this model's table of 100 learned positions"
    with pytest.raises(ConfigError, match=wanted) as refused:
        resolve(path, 1, *model)
    fix = "model.overrides = {max_position_embeddings = 128}"
    assert fix in refused.value.fix
    assert resolve(path, 1, *model[:4], f"--{fix.replace(' = ', '=', 1)}").model_args.longest == 128
    short = (longer.replace("128", "64"), *model[1:])
    for measured in ("position_seq_len=101", "passkey.lengths=[64, 101]"):
        key = measured.partition("=")[0]
        with pytest.raises(ConfigError, match=f"evaluation.{key} = 101 is longer than this model's table of 100"):
            resolve(path, 1, *short, f"--evaluation.{measured}")


@pytest.mark.parametrize(
    "of_training",
    [
        ("--lr_scheduler.warmup_steps=30",),
        ("--curriculum.stages[1].steps=0", "--curriculum.stages[1].until={short_loss_rise = 0.1, max_tokens = 5000}"),
        ("--curriculum.stages[1].lr={warmup_steps = 6}", "--evaluation.passkey.lengths=[250]"),
    ],
)
def test_the_doctor_asks_nothing_of_what_only_the_whole_training_has(
    tmp_path: Path, of_training: tuple[str, ...]
) -> None:
    stages = "{seq_len = 128, steps = 40, global_batch_tokens = 512}, {seq_len = 256, steps = 6, global_batch_tokens = "
    overrides = [f"--curriculum.stages=[{stages}1024}}]", "--evaluation.interval=2", *of_training]
    path = write_run(tmp_path)
    resolve(path, 1, *overrides)
    examined = doctor_config(load_config(path, overrides), 4)
    assert [stage.seq_len for stage in resolve_run(examined, 4).stages] == [256]


def test_a_model_that_another_architecture_takes_is_sent_there(tmp_path: Path) -> None:
    config, path = tmp_path / "config.json", write_run(tmp_path)
    with_dropout = LlamaConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, attention_dropout=0.1)
    config.write_text(json.dumps(with_dropout.to_dict()))
    model = ["--model.architecture=huggingface", "--model.flavor=", f"--model.config={config}", "--model.overrides={}"]
    with pytest.raises(ConfigError, match="calls attention with dropout, which is not supported") as refused:
        resolve(path, 1, *model)
    assert refused.value.fix == "set model.architecture = 'llama'"
    resolve(path, 1, "--model.architecture=llama", *model[1:])
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'") as refused:
        resolve(path, 1, *model[:3], "--model.overrides={hidden_sise = 64}")
    assert refused.value.fix.startswith("change model.overrides, or ")


# Mixtures, whose experts ranks may share.
OURS = ("--model.architecture=moe",)
THEIRS = (
    *("--model.architecture=huggingface", "--model.flavor=", "--model.overrides={}"),
    "--model.config={folder}/config.json",
)


@pytest.mark.parametrize(
    ("device", "overrides", "compiled", "chunk"),
    [
        ("cpu", (), False, 1024),
        ("cuda", (), True, 4096),
        ("cpu", ("--compile.enable=true",), True, 1024),
        ("cuda", ("--compile.enable=false",), False, 1024),
        ("cuda", (*OURS, "--parallel.ep=2"), True, 4096),
        ("cuda", OURS, True, 4096),
        ("cuda", (*THEIRS, "--parallel.ep=2"), True, 4096),
        ("cuda", ("--training.loss_chunk_tokens=512",), True, 512),
        ("cpu", ("--training.loss_chunk_tokens=512",), False, 512),
    ],
)
def test_blocks_are_compiled_and_the_loss_has_larger_chunks_on_cuda_unless_a_config_says_otherwise(
    tmp_path: Path, device: str, overrides: tuple[str, ...], compiled: bool, chunk: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Qwen3-MoE"]))
    text = TINY.replace("loss_chunk_tokens = 40\n", "")
    keys = [key.replace("{folder}", str(tmp_path)) for key in overrides]
    run = resolve(write_run(tmp_path, text), 2, *keys, device=device)
    assert (run.config.compile.enable, run.config.training.loss_chunk_tokens) == (compiled, chunk)
    assert not run.uncompiled


@pytest.mark.parametrize(
    ("family", "overrides", "wanted"),
    [
        ("Zamba2", (), "compile.enable is not supported by this model: its layers share weights"),
        ("Gemma 4", ("--activation.checkpoint=full",), "compile.enable and activation.checkpoint = 'full' exclude"),
        (
            "pipeline",
            ("--parallel.pp=2", "--parallel.pp_schedule=zbv_zero_bubble", "--model.overrides.n_layers=4"),
            "splits the backward of a block, which a compiled block cannot",
        ),
    ],
)
def test_what_excludes_compiled_blocks_is_refused_where_they_are_asked_for_and_named_where_they_are_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, overrides: tuple[str, ...], wanted: str
) -> None:
    monkeypatch.setattr("torchtitan_cp.parallel.pipeline_stages.SPLITS_ANY_BACKWARD", True)  # torch 2.13 does
    path = write_run(tmp_path)
    if family in FAMILIES:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(FAMILIES[family]))
        model = ("--model.architecture=huggingface", "--model.flavor=", "--model.overrides={}")
        overrides = (*model, f"--model.config={config}", *overrides)
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        resolve(path, 2, *overrides, "--compile.enable=true", device="cuda")
    run = resolve(path, 2, *overrides, device="cuda")
    assert run.config.compile.enable is False
    assert wanted in run.uncompiled
    assert not resolve(path, 2, *overrides).uncompiled, "on a CPU nothing is compiled anyway"


@pytest.mark.parametrize("architecture", ["llama", "moe", "qwen3_5"])
def test_updating_biases_that_routers_lack_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write_run(tmp_path, EXPERTS if architecture == "moe" else TINY)
    hybrid = ("--model.architecture=qwen3_5", "--model.flavor=debug", "--model.overrides={}")
    with pytest.raises(ConfigError, match="is for routers that choose experts by scores plus a bias, and this model"):
        resolve(path, 1, "--training.router_bias_update=1e-3", *(hybrid if architecture == "qwen3_5" else ()))
