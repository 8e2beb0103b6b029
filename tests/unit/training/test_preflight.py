"""What a run needs on its machine is looked at, and nothing is written."""

import builtins
import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models import ARCHITECTURES
from tests.support.huggingface_families import FAMILIES
from tests.support.runs import write_conversations, write_run
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.attention.kernels import KERNELS, choose_kernel, flash4
from torchtitan_cp.cli.check import main as check_config
from torchtitan_cp.config import Config, ConfigError, UserError, load_config
from torchtitan_cp.config.sections import Model
from torchtitan_cp.data.corpus.cache import CacheBuilder
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.preflight import (
    check_before_corpus,
    check_files,
    check_hub_weights,
    check_kernel,
    fit_vocabulary,
)
from torchtitan_cp.training.registry import model_args_of, register, start_folder
from torchtitan_cp.training.resolve import ResolvedRun, resolve_run

CHAT = ("--data.source=python-docstrings", "--data.path=", "--tokenizer.kind=bytes")


def resolve(path: Path, ranks: int, *overrides: str) -> ResolvedRun:
    register(ARCHITECTURES)
    return resolve_run(load_config(path, overrides), ranks)


def of_config(folder: Path, architecture: str) -> list[str]:
    """Overrides for a model of this architecture, with the sizes of a config.json."""
    file = folder / "hub" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(FAMILIES["Qwen3"] | {"vocab_size": 300, "rope_theta": 1e6}))
    sizes = ["--model.flavor=", "--model.overrides={}", f"--model.config={file}"]
    return [f"--model.architecture={architecture}", *sizes, "--curriculum.stages[0].rope={kind = 'linear', factor = 2}"]


@pytest.mark.parametrize("command", [[], ["--doctor"], ["--parity"]], ids=["train", "doctor", "parity"])
@pytest.mark.parametrize("model", ["flavor", "config.json", "conversations"])
def test_a_check_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, command: list[str]
) -> None:
    path = write_conversations(tmp_path) if model == "conversations" else write_run(tmp_path)
    overrides = of_config(tmp_path, "huggingface") if model == "config.json" else []
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def files() -> dict[Path, tuple[int, int]]:
        return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in tmp_path.rglob("*")}

    before = files()
    folder = ["--job.dump_folder=new/run", "--data.cache_folder=new/cache"]
    assert check_config([str(path), *command, *folder, *overrides]) == 0
    assert files() == before


@pytest.mark.parametrize("architecture", ["llama", "huggingface"])
def test_a_decision_reads_config_json_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    path, overrides, opened = write_run(tmp_path), of_config(tmp_path, architecture), list[str]()

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(file: Any, *arguments: Any, **named: Any) -> Any:
            opened.append(str(file))
            return plain(file, *arguments, **named)

        return open_file

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", counted(module.open))
    assert check_config([str(path), *overrides]) == 0
    config_json = tmp_path / "hub" / "config.json"
    assert opened.count(str(config_json)) == 1
    # Of another file at that place another decision is made.
    config_json.write_text(json.dumps(FAMILIES["Qwen3"] | {"vocab_size": 200}))
    opened.clear()
    assert check_config([str(path), *overrides]) == 2
    assert opened.count(str(config_json)) == 1


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
def test_a_kernel_is_refused_by_its_key_where_attention_would_refuse_it(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4, "_installed_version", lambda: flash4.VERSION)
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


def test_a_run_that_compiles_on_cuda_needs_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(ARCHITECTURES)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    path = write_run(tmp_path)
    keys = ("--context_parallel.kernel=reference",)  # no GPU is asked what it can
    compiled, plain = (
        resolve_run(load_config(path, [*keys, *more]), 2, device="cuda") for more in ((), ("--compile.enable=false",))
    )
    check_before_corpus(plain, "cuda")
    with pytest.raises(ConfigError, match="for which Triton needs a C compiler, and there is neither gcc nor clang"):
        check_before_corpus(compiled, "cuda")
    monkeypatch.setenv("CC", "cc")
    check_before_corpus(compiled, "cuda")
