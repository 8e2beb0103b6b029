"""The one place that decides whether a run may be: config and ranks in, a resolved run or an error out."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3_5TextConfig

from models import ARCHITECTURES
from tests.support.huggingface_families import FAMILIES
from tests.support.runs import EXPERTS, TINY, write_conversations, write_run
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.attention.kernels import KERNELS, choose_kernel
from torchtitan_cp.cli.check import main as check_config
from torchtitan_cp.config import Config, ConfigError, UserError, load_config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Model
from torchtitan_cp.data.corpus.cache import CacheBuilder
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.registry import model_args_of, register, start_folder
from torchtitan_cp.training.resolve import (
    ResolvedRun,
    check_files,
    check_hub_weights,
    check_kernel,
    doctor_config,
    fit_vocabulary,
    resolve_run,
)


def resolve(path: Path, ranks: int, *overrides: str) -> ResolvedRun:
    register(ARCHITECTURES)
    return resolve_run(load_config(path, overrides), ranks)


BATCH = "--curriculum.stages[0].global_batch_tokens"
FLOAT8 = ("--context_parallel.strategy=all_to_all", "--context_parallel.kv_transfer=float8")
PIPELINE = ("--parallel.pp=3", "--model.overrides.n_layers=6", f"{BATCH}=1536")


def test_a_run_has_the_degrees_of_each_stage_and_the_sizes_of_its_model(tmp_path: Path) -> None:
    run = resolve(write_run(tmp_path), 6, *PIPELINE, "--curriculum.stages[0].cp=2")
    assert run.degrees == (Degrees(pp=3, dp_replicate=1, dp_shard=2, cp=1, tp=1),)
    [stage] = run.stages
    assert (stage.pp, stage.cp, stage.dp) == (3, 2, 1)
    assert run.model_args.n_layers == 6
    assert run.config_of(stage).parallel.pp == 3


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


def runs(kernel: str, device: str, args: Any, config: Config) -> bool:
    """Whether attention takes the kernel for queries and values like the model's, on a device that is not there."""
    dtype = getattr(torch, config.training.compute_dtype)
    try:
        for qk_dim, v_dim, softcap in {(mixer.qk_dim, mixer.v_dim, mixer.softcap) for mixer in args.mixers}:
            with FakeTensorMode(), torch.device(device):
                q, v = (torch.empty(1, 8, 2, dim, dtype=dtype) for dim in (qk_dim, v_dim))
                choose_kernel(kernel, q, v, softcap=softcap)
    except ContextParallelError:
        return False
    return True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_is_refused_by_its_key_where_attention_would_refuse_it(tmp_path: Path, device: str) -> None:
    config, verdicts = load_config(write_run(tmp_path)), Counter[tuple[str, bool]]()
    llama = model_args_of(config.model)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Gemma 2"]))
    gemma = model_args_of(Model(architecture="huggingface", config=str(tmp_path / "config.json")))
    models = [gemma, *(replace(llama, head_dim=dim) for dim in (4, 16, 20, 64, 192, 256, 264))]
    for args, dtype, deterministic in product(models, ("float32", "bfloat16"), (False, True)):
        case = config.with_keys(training={"compute_dtype": dtype, "deterministic": deterministic})
        torch.use_deterministic_algorithms(deterministic)
        try:
            able = {kernel: runs(kernel, device, args, case) for kernel in ("auto", *KERNELS)}
        finally:
            torch.use_deterministic_algorithms(False)
        for kernel, expected in able.items():
            chosen = case.with_keys(context_parallel={"kernel": kernel})
            verdicts[kernel, expected] += 1
            if expected:
                check_kernel(chosen, args, device)
                continue
            says = f"context_parallel.kernel = '{kernel}' cannot run this model's attention here: it"
            with pytest.raises(ConfigError, match=says) as refused:
                check_kernel(chosen, args, device)
            assert [name for name in able if repr(name) in refused.value.fix] == [name for name in able if able[name]]
    assert all(verdicts[kernel, False] for kernel in KERNELS if kernel != "reference")
    assert all(verdicts[kernel, True] for kernel in KERNELS if KERNELS[kernel].device in (None, device))


def test_a_kernel_that_this_machine_lacks_is_found_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_config([str(path), "--context_parallel.kernel=flash"]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: context_parallel.kernel = 'flash' cannot run this model's attention here: it runs on cuda, "
        "not cpu\n  fix: set it to 'auto', or to 'cpu' or 'reference'\n"
    )
    assert check_config([str(path), "--context_parallel.kernel=flash", "--doctor"]) == 0, "which takes auto"
    assert check_config([str(path), "--context_parallel.kernel=flash", "--parity"]) == 2


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
    hybrid = Qwen3_5TextConfig(num_hidden_layers=4, vocab_size=300)
    config.write_text(json.dumps(hybrid.to_dict()))
    model = ["--model.architecture=huggingface", "--model.flavor=", f"--model.config={config}", "--model.overrides={}"]
    with pytest.raises(ConfigError, match="a layer of linear_attention, which is unsupported") as refused:
        resolve(path, 1, *model)
    assert refused.value.fix == "set model.architecture = 'qwen3_5'"
    resolve(path, 1, "--model.architecture=qwen3_5", *model[1:])
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'") as refused:
        resolve(path, 1, *model[:3], "--model.overrides={hidden_sise = 64}")
    assert refused.value.fix.startswith("change model.overrides, or ")


def test_a_compiled_mixture_without_a_fixed_number_of_tokens_is_refused(tmp_path: Path) -> None:
    config, path = tmp_path / "config.json", write_run(tmp_path)
    config.write_text(json.dumps(FAMILIES["Qwen3-MoE"]))
    model = ("--model.architecture=huggingface", "--model.flavor=", f"--model.config={config}", "--model.overrides={}")
    with pytest.raises(ConfigError, match=r"compile.enable excludes parallel.ep above 1"):
        resolve(path, 2, *model, "--compile.enable=true", "--parallel.ep=2")
    resolve(path, 2, *model, "--compile.enable=true")


@pytest.mark.parametrize("architecture", ["llama", "moe", "qwen3_5"])
def test_updating_biases_that_routers_lack_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write_run(tmp_path, EXPERTS if architecture == "moe" else TINY)
    hybrid = ("--model.architecture=qwen3_5", "--model.flavor=debug", "--model.overrides={}")
    with pytest.raises(ConfigError, match="is for routers that choose experts by scores plus a bias, and this model"):
        resolve(path, 1, "--training.router_bias_update=1e-3", *(hybrid if architecture == "qwen3_5" else ()))


def test_the_checkpoint_to_start_from_brings_its_template(tmp_path: Path) -> None:
    path, hub = write_conversations(tmp_path), tmp_path / "hub"
    hub.mkdir()
    (tmp_path / "chat.jinja").rename(hub / "chat_template.jinja")
    config = load_config(path, ["--data.chat_template=", f"--model.hub_checkpoint={hub}"])
    args = fit_vocabulary(resolve(path, 1), 257)
    check_files(config)
    with pytest.raises(ConfigError, match=r"hub has neither model.safetensors nor .*\n  fix: give a folder"):
        check_hub_weights(config, args)
    check_hub_weights(config.with_keys(model={"load_weights": False}), args)
    (tmp_path / "run" / "checkpoints" / "step-1.partial").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"hub has neither model\.safetensors nor"):
        check_hub_weights(config, args)
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir()
    check_hub_weights(config, args)  # of a run that goes on
    assert CacheBuilder(config.data, config.tokenizer, lambda: False, start_folder(config.model)).build()["folders"]
    trained = config.with_keys(tokenizer={"kind": "sentencepiece", "vocab_size": 320})
    assert tokenizer_of(trained).vocab_size == 320, "generate and export train it again where the run's copy is gone"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.overrides.vocab_size=256", "the model has 256 embeddings and the tokenizer 257 pieces"),
    ],
)
def test_ids_that_tokenizer_or_model_lack_are_refused_before_the_corpus_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, message: str
) -> None:
    path = write_run(tmp_path)
    assert check_config([str(path), f"--{key}"]) == 2
    assert message in capsys.readouterr().err
    large = resolve(path, 1, "--model.overrides.vocab_size=300")
    assert fit_vocabulary(large, 257).vocab_size == 300
    assert fit_vocabulary(resolve(path, 1), 257).vocab_size == 257


def test_a_run_on_conversations_without_a_template_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data holds conversations, and there is no chat template"):
        check_files(resolve(write_run(tmp_path), 1, *CHAT).config)


def test_a_comparison_needs_no_weights_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "hub" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(FAMILIES["Qwen3"] | {"vocab_size": 300}))
    model = ["--model.architecture=huggingface", "--model.flavor=", "--model.overrides={}"]
    arguments = [str(write_run(tmp_path)), *model, f"--model.hub_checkpoint={config.parent}"]
    register(ARCHITECTURES)
    assert check_config(arguments) == 2
    assert "has neither model.safetensors nor" in capsys.readouterr().err
    assert check_config([*arguments, "--doctor"]) == check_config([*arguments, "--parity"]) == 0
