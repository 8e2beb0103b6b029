"""Sizes of a model that config.json gives, and what contradicts it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.hub_models import PLAIN, SHAPES, change_config, hub_problem, write_start
from tests.support.huggingface_families import FAMILIES
from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Model
from torchtitan_cp.training.registry import hub_folder, model_args_of, register, start_config


@pytest.mark.parametrize("family", SHAPES)
def test_sizes_that_the_config_leaves_out_are_the_checkpoints(tmp_path: Path, family: str) -> None:
    path = write_start(tmp_path, family)
    typed, read = (model_args_of(load_config(path, overrides).model) for overrides in ((), PLAIN))
    assert read.vocab_size == 288
    # The same windows can be written in several ways.
    assert dataclasses.replace(read, windows=typed.windows) == typed
    assert read.mixers == typed.mixers


class RepositoryNotFoundError(Exception):
    """As huggingface_hub.errors names it."""


class GatedRepoError(RepositoryNotFoundError):
    """The same."""


def unreachable() -> Exception:
    """What huggingface_hub raises where there is no network: two lines, and the cause."""
    error = FileNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nAn error happened while ...")
    error.__cause__ = ConnectionError("[Errno -2] Name or service not known")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            unreachable(),
            "and downloading it from the hub failed: [Errno -2] Name or service not known\n  fix: give a folder with "
            "config.json and *.safetensors; on a machine that reaches the hub, `hf download someone/model --local-dir "
            "FOLDER` makes one",
        ),
        (
            RepositoryNotFoundError("401 Client Error.\nRepository Not Found for url ..."),
            "and the hub has none of this name for this user (401 Client Error.)\n  fix: correct the folder or",
        ),
        (
            GatedRepoError("403 Client Error."),
            "and on the hub it is given only to those who accept its conditions (403 Client Error.)\n  fix: accept "
            "them on the page of someone/model, and log in",
        ),
    ],
)
def test_a_name_on_the_hub_that_gives_no_files_is_one_line_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError) as caught:
        hub_folder(Model(hub_checkpoint="someone/model"))
    assert f"model.hub_checkpoint: there is no folder someone/model, {said}" in str(caught.value)


def test_what_contradicts_the_config_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_start(tmp_path, "mistral")
    args = model_args_of(load_config(path, []).model)
    assert (args.vocab_size, args.windows) == (288, (20,)), "the vocabulary is the checkpoint's"
    message = hub_problem(path, "--model.overrides.n_layers=2", "--model.overrides.windows=[0]")
    assert "n_layers = 2, not 4, windows = (0,), not (20,)" in message
    assert "leave out model.flavor and model.overrides, as" in message
    assert "model.overrides contradicts" in hub_problem(path, "--model.flavor=", "--model.overrides={n_layers = 2}")
    message = hub_problem(path, "--model.flavor=60M", "--model.overrides={}")
    assert "model.flavor contradicts" in message
    assert "leave out model.flavor, as the sizes are the checkpoint's (on a command line --model.flavor=)" in message
    fresh = load_config(path, ["--model.load_weights=false", "--model.overrides.n_layers=2"])
    assert model_args_of(fresh.model).n_layers == 2
    absent = hub_problem(path, "--model.hub_checkpoint=/none")
    assert "cannot be read: No such file" in absent
    assert "as `hf download --local-dir` makes it" in absent
    assert f"a path is relative to the current directory, {Path.cwd()}" in absent
    change_config(tmp_path / "hub", model_type="gpt2")
    assert "model_type is 'gpt2', and this architecture is llama, mistral" in hub_problem(path)
    change_config(tmp_path / "hub", model_type="llama", attention_bias=True)
    assert "attention_bias is True, and these blocks have False" in hub_problem(path)
    change_config(tmp_path / "hub", model_type=["llama"])
    assert "config.json: unhashable type: 'list'" in hub_problem(path)
    change_config(tmp_path / "hub", model_type="llama", attention_bias=False, num_attention_heads=0)
    assert "every size must be at least 1" in hub_problem(path, *PLAIN)
    change_config(tmp_path / "hub", num_attention_heads="4")
    assert "config.json: num_attention_heads is '4', in quotes" in hub_problem(path)
    (tmp_path / "hub" / "config.json").write_text("null")
    assert "config.json cannot be read: 'NoneType' object is not iterable" in hub_problem(path)
    assert "~nobody-here/config.json cannot be read" in hub_problem(path, "--model.hub_checkpoint=~nobody-here")
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "llama"}')
    assert "config.json has no 'num_attention_heads'" in hub_problem(path)


@pytest.mark.parametrize("architecture", ["llama", "huggingface"])
def test_quantized_weights_are_refused_and_a_model_of_their_sizes_is_not_quantized(
    tmp_path: Path, architecture: str
) -> None:
    path, chosen = write_start(tmp_path, "llama"), (*PLAIN, f"--model.architecture={architecture}")
    plain = model_args_of(load_config(path, chosen).model)
    change_config(tmp_path / "hub", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    message = hub_problem(path, *chosen)
    assert "its weights are quantized (quantization_config)" in message
    assert "fix: use a checkpoint in bfloat16 or float32, or model.load_weights = false" in message
    fresh = ["--model.load_weights=false"], ["--model.hub_checkpoint=", f"--model.config={tmp_path / 'hub'}"]
    for overrides in fresh:
        assert model_args_of(load_config(path, [*chosen, *overrides]).model) == plain
    config = (tmp_path / "hub" / "config.json").read_text()
    (tmp_path / "hub" / "config.json").write_text(f'{{"model_type": "mistral3", "text_config": {config}}}')
    assert "its weights are quantized" in hub_problem(path, *chosen)


def test_the_models_own_theta_is_its_familys_where_config_json_has_none(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Mixtral"]))
    model = Model(architecture="huggingface", config=str(tmp_path))
    assert "rope_theta" not in FAMILIES["Mixtral"]
    assert hub_rope(start_config(model, model_args_of(model))) == Rope(1e6)


@pytest.mark.deep
def test_a_model_without_weights_is_built_without_torchs_compiler() -> None:
    """First values of an embedding on the meta device would import it, and DTensor: seconds."""
    code = """
import sys
from models import ARCHITECTURES
from models.llama import FLAVORS
from torchtitan_cp.config.sections import Model
from torchtitan_cp.training import registry
registry.register(ARCHITECTURES)
model = registry.empty_model(Model("llama"), FLAVORS["8B"])
print(all(parameter.is_meta for parameter in model.parameters()))
print([name for name in ("torch.distributed.tensor", "torch._inductor.compile_fx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "[]"]
