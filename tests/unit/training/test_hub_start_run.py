"""A run that starts from a Hugging Face checkpoint: what is filled in from it, and what is refused before it starts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from models import ARCHITECTURES
from tests.support.hub_models import PLAIN, SHAPES, change_config, write_start
from tests.support.runs import TINY, write_run
from torchtitan_cp.checkpoint.hub import INDEX_FILE
from torchtitan_cp.cli.check import check_run
from torchtitan_cp.config import ConfigError, load_config, to_toml
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.training.preflight import check_hub_weights
from torchtitan_cp.training.registry import model_args_of, register
from torchtitan_cp.training.resolve import resolve_run


def test_a_model_without_words_there_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    path = write_run(tmp_path, TINY)
    with pytest.raises(ConfigError, match=r"cannot be written in Hugging Face's format: .*\n.*checkpoint.export"):
        check_run(load_config(path, ["--checkpoint.export=float32", "--model.overrides.sinks=true"]), 1)
    with pytest.raises(ConfigError, match=r"checkpoint.export needs checkpoints"):
        check_run(load_config(path, ["--checkpoint.export=float32", "--checkpoint.enable=false"]), 1)


@pytest.mark.parametrize("family", SHAPES)
def test_a_stage_without_a_rope_has_the_checkpoints(tmp_path: Path, family: str) -> None:
    path = write_start(tmp_path, family)
    written = load_config(path).curriculum.stages[0].rope
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("rope")))
    assert resolve_run(load_config(path, PLAIN), 1).stages[0].rope == written
    own = resolve_run(load_config(path, [*PLAIN, "--curriculum.stages[0].rope={theta = 10000}"]), 1)
    assert own.stages[0].rope == Rope(theta=1e4)


@pytest.mark.parametrize("architecture", ["llama", "huggingface"])
def test_keys_that_a_stages_rope_leaves_out_are_the_checkpoints(tmp_path: Path, architecture: str) -> None:
    register(ARCHITECTURES)
    path = write_start(tmp_path, "llama")
    parameters = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 2.0, "original_max_position_embeddings": 64}
    chosen = (*PLAIN, f"--model.architecture={architecture}")

    def rope(keys: str, **more: object) -> Rope | None:
        change_config(tmp_path / "hub", rope_parameters=parameters | more)
        run = resolve_run(load_config(path, [*chosen, f"--curriculum.stages[0].rope={{{keys}}}"]), 1)
        path.with_name("again.toml").write_text(to_toml(run.config))
        assert load_config(path.with_name("again.toml")) == run.config
        return run.stages[0].rope

    yarn = Rope(1.5e5, "yarn", 4.0, original_seq_len=64, truncate=False)
    for keys in ("factor = 4.0", "factor = 4.0, original_seq_len = 64"):
        assert rope(f"kind = 'yarn', {keys}", truncate=False) == yarn
        # Of OLMo 3, as the paper's factor for 2; and of DeepSeek, for any.
        assert rope(f"kind = 'yarn', {keys}", truncate=False, attention_factor=1.07) == yarn
        mscale: dict[str, Any] = {"mscale": 0.7, "mscale_all_dim": 0.7}
        assert rope(f"kind = 'yarn', {keys}", truncate=False, **mscale) == dataclasses.replace(yarn, **mscale)
    assert rope("kind = 'yarn', attention_factor = 1.2", mscale=1.0, mscale_all_dim=1.0) == Rope(
        1.5e5, "yarn", 2.0, original_seq_len=64, attention_factor=1.2
    )
    assert rope("kind = 'linear', factor = 4.0", truncate=False) == Rope(1.5e5, "linear", 4.0)
    assert rope("") == Rope(1.5e5)
    assert rope("theta = 10000", rope_type="dynamic") == Rope(), "what the file says stays"


def test_a_yarn_that_is_too_short_for_its_stage_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register(ARCHITECTURES)
    path = write_run(tmp_path, TINY)
    rope = "--curriculum.stages[0].rope={kind = 'yarn', factor = %s, original_seq_len = 32}"
    check_run(load_config(path, [rope % 4.0]), 1)
    assert not caplog.records
    check_run(load_config(path, [rope % 3.0]), 1)
    assert "stages[0].rope: factor x original_seq_len = 96 is shorter than the stage's seq_len = 128" in caplog.text


def test_check_refuses_overrides_that_the_weights_do_not_fit(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    path = write_start(tmp_path, "qwen3")
    chosen = (*PLAIN, "--model.architecture=huggingface")
    assert "steps on 1 rank" in check_run(load_config(path, [*chosen, "--model.overrides.rms_norm_eps=1e-5"]), 1)
    for key, says in (
        ("num_hidden_layers = 3", "has model.layers.3.input_layernorm.weight, which the model of 3 layers"),
        ("intermediate_size = 64", r"mlp.down_proj.weight is \[48, 64\]"),
    ):
        with pytest.raises(ConfigError, match=f"{says}.*\n  fix: .* without model.overrides of its sizes"):
            check_run(load_config(path, [*chosen, f"--model.overrides={{{key}}}"]), 1)
    fresh = "--model.load_weights=false", "--model.overrides.num_hidden_layers=3"
    assert "steps on 1 rank" in check_run(load_config(path, [*chosen, *fresh]), 1)


def test_a_name_on_the_hub_is_checked_by_its_files_and_downloaded_before_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = write_start(tmp_path, "llama"), list[str]()
    files: Any = ["config.json", "pytorch_model-00001-of-00002.bin"]

    def list_files(self: Any, name: str) -> list[str]:
        if isinstance(files, list):
            return files
        raise files

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns[-1])
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = load_config(path, [*PLAIN, "--model.hub_checkpoint=someone/something"])
    pickled = r"something has neither .*; pytorch_model-00001-of-00002.bin holds pickled weights, .* read\n.*save"
    with pytest.raises(ConfigError, match=pickled):
        check_run(config, 1)
    for files in (["config.json", INDEX_FILE], ConnectionError("offline")):  # noqa: B007
        check_run(config, 1)
    assert set(asked) == {"config.json"}, "a check downloads no weights"
    args = model_args_of(config.model)
    check_hub_weights(config, args, download=True)
    assert asked[-1] == "*.safetensors*"
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"safetensors is a pointer of Git LFS, not the weights\n.*git lfs pull"):
        check_hub_weights(config, args, download=True)
