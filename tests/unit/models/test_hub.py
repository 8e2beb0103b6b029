"""Hugging Face checkpoints that cannot be started from are refused with the reason; what is read of their configs."""

import copy
import dataclasses
import itertools
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models import ARCHITECTURES
from models.llama import Llama, LlamaArgs
from models.llama.hub import HUB
from tests.support.hub_models import SHAPES, save_model, write_start
from tests.support.runs import TINY, write_run
from torchtitan_cp.checkpoint.hub import INDEX_FILE, load_parts, save_hub_weights
from torchtitan_cp.checkpoint.hub_rope import hub_rope, rope_parameters
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.cli.check import preflight
from torchtitan_cp.config import Config, ConfigError, load_config, to_toml
from torchtitan_cp.config.sections import Model, Rope, Tokenizer
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.training.registry import model_args_of, register
from torchtitan_cp.training.resolve import check_hub_weights, resolve_run
from torchtitan_cp.training.resume import resume


def test_a_model_without_words_there_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    path = write_run(tmp_path, TINY)
    with pytest.raises(ConfigError, match=r"cannot be written in Hugging Face's format: .*\n.*checkpoint.export"):
        preflight(load_config(path, ["--checkpoint.export=float32", "--model.overrides.sinks=true"]), 1)
    with pytest.raises(ConfigError, match=r"checkpoint.export needs checkpoints"):
        preflight(load_config(path, ["--checkpoint.export=float32", "--checkpoint.enable=false"]), 1)


ROPES = {
    "ntk is another theta": (
        Rope(theta=1e4, kind="ntk", factor=4.0),
        {"rope_type": "default", "rope_theta": 1e4 * 4.0 ** (64 / 62)},
    ),
    "linear": (Rope(kind="linear", factor=4.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "yarn without truncation": (
        Rope(kind="yarn", factor=4.0, original_seq_len=64, truncate=False),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "longrope with one list": (
        Rope(kind="longrope", factor=4.0, original_seq_len=64, long_factor=(2.0, 3.0)),
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "long_factor": [2.0, 3.0],
            "short_factor": [2.0, 3.0],
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_scaling_is_written_with_their_keys(name: str) -> None:
    rope, want = ROPES[name]
    assert rope_parameters(rope, 64) == want


THIRD_NORM = "model.layers.2.post_attention_layernorm.weight"


def hub_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        model_args_of(load_config(path, overrides).model)
    return str(caught.value)


def change_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


PLAIN = ("--model.flavor=", "--model.overrides={}")


@pytest.mark.parametrize("family", SHAPES)
def test_sizes_that_the_config_leaves_out_are_the_checkpoints(tmp_path: Path, family: str) -> None:
    path = write_start(tmp_path, family)
    typed, read = (model_args_of(load_config(path, overrides).model) for overrides in ((), PLAIN))
    assert read.vocab_size == 288
    # The same windows can be written in several ways.
    assert dataclasses.replace(read, windows=typed.windows) == typed
    assert read.layer_windows == typed.layer_windows


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
    preflight(load_config(path, [rope % 4.0]), 1)
    assert not caplog.records
    preflight(load_config(path, [rope % 3.0]), 1)
    assert "stages[0].rope: factor x original_seq_len = 96 is shorter than the stage's seq_len = 128" in caplog.text


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope()),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
            Rope(theta=1e6, kind="yarn", factor=4.0, original_seq_len=32768),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0, "attention_factor": None}},
            Rope(kind="linear", factor=8.0),
        ),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 5e5}}}, Rope()),
    ],
)
def test_a_rope_is_read_as_any_version_of_transformers_wrote_it(keys: dict[str, Any], rope: Rope) -> None:
    assert hub_rope(keys) == rope


def test_a_rope_that_no_stage_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"type 'dynamic'\n  fix: give each stage a rope of its own"):
        hub_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize(
    "keys",
    [{"rope_scaling": "x"}, {"rope_parameters": [1]}, {"text_config": 3}, {"max_position_embeddings": "long"}],
)
def test_a_rope_of_the_wrong_type_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"embedding that cannot be read: .*\n  fix: give each stage a rope"):
        hub_rope(keys)


def test_a_rope_inside_a_text_config_is_scaled_from_the_length_beside_it() -> None:
    scaling = {"type": "longrope", "long_factor": [2.0, 4.0]}
    text = {"rope_scaling": scaling, "max_position_embeddings": 8192, "original_max_position_embeddings": 4096}
    rope = hub_rope({"text_config": text})
    assert (rope.original_seq_len, rope.factor) == (4096, 2.0)


LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.4}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "mscale": 0.7}),
        ("yarn", {"factor": 4.0, **MSCALE, "truncate": False}),
        ("yarn", {"factor": 4.0, **MSCALE, "attention_factor": 1.3}),
        ("longrope", LISTS),
        ("longrope", {**LISTS, "factor": 8.0}),
        ("longrope", {**LISTS, "attention_factor": 1.2}),
    ],
)
def test_a_rope_of_a_config_has_the_frequencies_and_factor_of_transformers(kind: str, keys: dict[str, Any]) -> None:
    original = "original_max_position_embeddings"
    for inside, beside, old in itertools.product(({}, {original: 512}), ({}, {original: 1024}), (False, True)):
        scaling = {"type" if old else "rope_type": kind, **keys, **inside}
        older, newer = {"rope_theta": 5e5, "rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": 5e5}}
        config = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, **beside}
        config |= older if old else newer
        ours, factor = rope_frequencies(hub_rope(config), 16, 4096)
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(config)))
        rotary(torch.zeros(1), torch.arange(4096)[None])  # longrope chooses its list by the largest position
        assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12), config
        # The bounds of test_rope: theirs are of fp32.
        assert ours == pytest.approx(rotary.inv_freq.tolist(), rel=1e-6, abs=1.4e-6), config


def test_what_contradicts_the_config_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_start(tmp_path, "mistral")
    args = model_args_of(load_config(path, []).model)
    assert (args.vocab_size, args.windows) == (288, (20,)), "the vocabulary is the checkpoint's"
    message = hub_problem(path, "--model.overrides.n_layers=2", "--model.overrides.windows=[0]")
    assert "n_layers = 2, not 4, windows = (0,), not (20,)" in message
    assert "leave out model.flavor and these overrides" in message
    assert "model.overrides contradicts" in hub_problem(path, "--model.flavor=", "--model.overrides={n_layers = 2}")
    assert "model.flavor contradicts" in hub_problem(path, "--model.flavor=60M", "--model.overrides={}")
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


def test_check_refuses_overrides_that_the_weights_do_not_fit(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    path = write_start(tmp_path, "qwen3")
    chosen = (*PLAIN, "--model.architecture=huggingface")
    assert "steps on 1 rank" in preflight(load_config(path, [*chosen, "--model.overrides.rms_norm_eps=1e-5"]), 1)
    for key, says in (
        ("num_hidden_layers = 3", "has model.layers.3.input_layernorm.weight, which the model of 3 layers"),
        ("intermediate_size = 64", r"mlp.down_proj.weight is \[48, 64\]"),
    ):
        with pytest.raises(ConfigError, match=f"{says}.*\n  fix: .* without model.overrides of its sizes"):
            preflight(load_config(path, [*chosen, f"--model.overrides={{{key}}}"]), 1)
    fresh = "--model.load_weights=false", "--model.overrides.num_hidden_layers=3"
    assert "steps on 1 rank" in preflight(load_config(path, [*chosen, *fresh]), 1)


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
        preflight(config, 1)
    for files in (["config.json", INDEX_FILE], ConnectionError("offline")):  # noqa: B007
        preflight(config, 1)
    assert set(asked) == {"config.json"}, "a check downloads no weights"
    args = model_args_of(config.model)
    check_hub_weights(config, args, download=True)
    assert asked[-1] == "*.safetensors*"
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"safetensors is a pointer of Git LFS, not the weights\n.*git lfs pull"):
        check_hub_weights(config, args, download=True)


def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, norm_eps=1e-6), lambda *_: torch.zeros(()))
    whole = load_file(tmp_path / "model.safetensors")
    names = [name for name, _ in model.named_parameters()]

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            load_parts(tmp_path, [model], names, HUB)
        return str(caught.value)

    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, tmp_path / "model.safetensors")
    assert "has no tensor model.norm.weight, which is our norm.weight" in problem()
    save_file({**whole, "model.layers.0.mlp.down_proj.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert "no place for: model.layers.0.mlp.down_proj.bias" in problem()
    # Qwen2 and Qwen3 have these, and another model has more layers.
    for other in ("0.self_attn.q_proj.bias", "0.self_attn.q_norm.weight", "4.input_layernorm.weight"):
        save_file({**whole, f"model.layers.{other}": torch.ones(48)}, tmp_path / "model.safetensors")
        assert f"no place for: model.layers.{other}" in problem()
    save_file({**whole, "model.norm.weight": torch.ones(48, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "is quantized: model.norm.weight is I8; save it in bfloat16 first" in problem()
    save_file({**whole, "model.norm.weight": torch.zeros(47)}, tmp_path / "model.safetensors")
    assert "model.norm.weight has the shape [47], and the model's is [48]" in problem()
    for index, says in (
        ({"weight_map": {"lm_head.weights": "model.safetensors"}}, "has no lm_head.weights in the file that its index"),
        ({"weight_map": {"lm_head.weight": None}}, "has an index that cannot be read: "),
        ({"weight_map": None}, "has an index that cannot be read: 'NoneType'"),
        ({"weight_map": [1]}, "has an index that cannot be read: 'list'"),
        ([1], "has an index that cannot be read: list indices"),
    ):
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
        assert says in problem()
        assert "fix: give a folder with config.json and complete" in problem()
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:5000])
    assert "model.safetensors cannot be read" in problem()
    (tmp_path / "model.safetensors").unlink()
    assert f"has neither model.safetensors nor {INDEX_FILE}" in problem()


def test_a_pipeline_stage_is_filled_from_the_whole_models_files(tmp_path: Path) -> None:
    save_model("llama, tied", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    tied = whole["model.embed_tokens.weight"].clone()
    more = {"lm_head.weight": tied, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file({**whole, **more}, tmp_path / "model.safetensors")
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, tie_embeddings=True), lambda *_: torch.zeros(()))
    names = [name for name, _ in model.named_parameters()]
    load_parts(tmp_path, [model], names, HUB)
    save_file({**whole, **more, "lm_head.weight": tied + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"other values in lm_head.weight than in the weight that it is tied to\n"):
        load_parts(tmp_path, [model], names, HUB)
    model.keep_layers(1, 3)
    load_parts(tmp_path, [model], names, HUB)
    assert torch.equal(model.get_parameter("layers.2.ffn_norm.weight"), whole[THIRD_NORM])


def test_every_stage_that_changes_the_rotary_embedding_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model("llama", tmp_path)
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}  # what it leaves out is as we have it
    change_config(tmp_path, rope_parameters=yarn)
    own = hub_rope(json.loads((tmp_path / "config.json").read_text()))
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, norm_eps=1e-6), lambda *_: torch.zeros(()))
    ropes = None, own, dataclasses.replace(own, theta=1e4), dataclasses.replace(own, truncate=False)
    trained: Any = SimpleNamespace(
        config=Config(model=Model(hub_checkpoint=str(tmp_path)), tokenizer=Tokenizer("bytes")),
        parts=[model],
        parameter_names=[name for name, _ in model.named_parameters()],
        args=SimpleNamespace(rotary_dim=12, layer_windows=(0,)),
        world=SimpleNamespace(rank=0),
    )
    stages: Any = [SimpleNamespace(rope=rope, index=index, seq_len=128) for index, rope in enumerate(ropes)]
    register(ARCHITECTURES)
    with caplog.at_level(logging.INFO, "torchtitan_cp.training"):
        assert resume(None, fresh := Progress(), stages, trained, None) is fresh  # type: ignore[arg-type]
    says = "changes the rotary embedding they were trained with:"
    assert [record.getMessage() for record in caplog.records[1:]] == [
        f"stage 3 {says} rope_theta 1000000.0 -> 10000.0",
        f"stage 4 {says} truncate True -> False",
        "stage 3 changes the RoPE of stage 2: theta 1e+06 -> 10000",
        "stage 4 changes the RoPE of stage 3: theta 10000 -> 1e+06, truncate True -> False",
    ]


def test_exported_files_may_be_read_by_those_who_may_read_the_folder(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        (tmp_path / "out").mkdir()
    finally:
        os.umask(old)
    save_hub_weights(tmp_path / "out", {"w": 4}, lambda names: dict.fromkeys(names, torch.ones(1)))
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_options_that_no_family_has_are_not_exported() -> None:
    shape = LlamaArgs(48, 4, 4, 2, 12, 96, 288)
    for options, message in (
        ({"sinks": True}, "no published family of this block has sinks"),
        ({"qkv_bias": True, "qk_norm": True}, "has qkv_bias and qk_norm"),
        ({"windows": (20, 0)}, r"mistral has one window in every layer, and windows = \[20, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            HUB.config(LlamaArgs(**{**shape.__dict__, **options}))  # type: ignore[arg-type]
