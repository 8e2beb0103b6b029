"""A model that would be wrong across ranks is refused before a run, by the layer and class that stand in its way."""

import json
import re
from pathlib import Path

import pytest

from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, REFUSED, eager_model
from tests.support.huggingface_parity import write_config
from torchtitan_cp.cli.check import main

DEFAULT = ("PhiMoE", "Gemma, as in PaliGemma", "Llama 4", "Jamba", "MPT", "Dory, one loop")


@deep_rows("family", REFUSED, default=[name for name in DEFAULT if name in REFUSED])
def test_check_refuses_a_model_that_would_be_wrong_and_names_layer_and_class(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_config(tmp_path, REFUSED[family])), "--ranks=2"]) == 2
    named = re.search(r"config\.json: (\S+) \((\w+)\)", capsys.readouterr().err)
    assert named, "no layer with its class"
    module = eager_model(REFUSED[family]).get_submodule(named[1])
    assert type(module).__name__ == named[2]
    assert re.search(r"\.\d+\b|lm_head", named[1]), named[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "code from a checkpoint"),
        (
            {**FAMILIES["Llama"], "output_router_logits": True, "router_aux_loss_coef": 0.01},
            "the balance loss of LlamaForCausalLM is not supported: set output_router_logits = false",
        ),
        (
            {**FAMILIES["Llama"], "attention_dropout": 0.1},
            "model.layers.0.self_attn (LlamaAttention) calls attention with dropout, which is not supported",
        ),
    ],
)
def test_check_refuses_what_a_config_asks_for_and_no_run_could_do(
    change: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, {"model_type": "llama"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    assert main([str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_rope_that_an_export_cannot_say_is_refused_before_a_run_that_is_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = 'seq_len = 128, steps = 1, global_batch_tokens = 256, rope = {kind = "yarn", factor = 2.0'
    run = [str(write_config(tmp_path, FAMILIES["Ministral 3"])), "--checkpoint.export=bfloat16"]
    assert main([*run, f"--curriculum.stages=[{{{stage}, original_seq_len = 128}}}}]"]) == 2
    assert "original_seq_len has to be that" in capsys.readouterr().err
    assert main([*run, f"--curriculum.stages=[{{{stage}, original_seq_len = 64}}}}]"]) == 0


@pytest.mark.parametrize(
    ("key", "value"), [("parallel.tp", 2), ("parallel.pp", 2), ("activation.mlp_tiles", 2), ("model.flavor", "8B")]
)
def test_check_refuses_by_name_what_these_models_lack(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, FAMILIES["Llama"])
    assert main([str(path), "--ranks=2", f"--{key}={value}"]) == 2
    assert key in capsys.readouterr().err


BALANCED = {**FAMILIES["Qwen3-MoE"], "output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("config", "says"),
    [(FAMILIES["Gemma 4"], "hand their keys on to later ones"), (BALANCED, "to the balance loss")],
)
def test_check_refuses_to_compile_recomputed_layers_that_hand_more_on_than_their_output(
    config: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, config)
    assert main([str(path), "--compile.enable=true", "--activation.checkpoint=full"]) == 2
    said = capsys.readouterr().err
    assert "compile.enable and activation.checkpoint = 'full' exclude each other" in said
    assert says in said
    assert main([str(path), "--activation.checkpoint=full"]) == 0
    assert main([str(path), "--compile.enable=true", "--activation.checkpoint=none"]) == 0


def test_layers_whose_experts_ranks_share_may_hand_their_routers_logits_on(tmp_path: Path) -> None:
    path = write_config(tmp_path, BALANCED)
    shared = ("--ranks", "2", "--parallel.ep=2", "--activation.checkpoint=full")
    assert main([str(path), "--compile.enable=true", *shared]) == 0


def test_check_refuses_to_compile_layers_that_share_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, FAMILIES["Zamba2"])
    assert main([str(path), "--compile.enable=true"]) == 2
    assert "compile.enable is not supported by this model: its layers share weights" in capsys.readouterr().err
    assert main([str(path)]) == 0
