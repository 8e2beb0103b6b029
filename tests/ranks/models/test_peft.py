"""Adapters in PEFT's format, out and in, and merged, with PEFT and transformers as the judges."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.hub_models import PLAIN, write_start
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import prepared, train, write_run
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli.evaluate import evaluate
from torchtitan_cp.cli.generate import KVCache, load_model
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.export import export

ONE_STEP = ("--curriculum.stages[0].steps=1", "--optimizer.lr=0")
TRAINED = ("--curriculum.stages[0].steps=3", "--optimizer.lr=0.02", "--lora.rank=4")
# Family, and keys beside TRAINED.
CASES = {
    "llama": ("llama", ("--lora.train=['norm']",)),
    "a tied embedding": ("qwen3", ("--lora.train=['tok_embeddings', 'q_norm']", "--lora.rslora=true")),
    "some layers": ("qwen2", ("--lora.targets=['w[qv]$', 'layers.1.*w2']",)),
    "a model of transformers": ("qwen2", (*PLAIN, "--model.architecture=huggingface", "--lora.train=['layernorm']")),
}


def write_base(folder: Path, family: str) -> Path:
    """A model in bf16, as frozen weights are stored, and a config of ours that starts from it."""
    path = write_start(folder, family)
    file = folder / "hub" / "model.safetensors"
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return path


def sequences(path: Path, *keys: str) -> Tensor:
    """On a rank: tokens of two sequences."""
    trainer = prepared(path, *keys)
    trainer.enter_stage(trainer.stages[0])
    return torch.stack([torch.from_numpy(trainer.data_pipeline.samples.sequence(n).tokens) for n in range(2)])


def validation_loss(folder: Path) -> float:
    """On a rank: what `evaluate` finds."""
    saved = open_saved_model(folder, collective=True)
    return evaluate(saved, load_config(folder / "config.toml"), start_ranks(60.0)).loss


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_peft_and_transformers_have_the_logits_of_the_adapted_model(
    ranks: Callable[[int], RankPool], tmp_path: Path, case: str
) -> None:
    family, keys = CASES[case]
    path = write_base(tmp_path, family)
    tokens = ranks(1)(sequences, path, *keys)[0]
    ranks(1)(train, path, *TRAINED, *keys)
    model = load_model(open_saved_model(tmp_path / "run"), torch.device("cpu"))
    ours = torch.cat([model(row, torch.arange(128), iter([KVCache() for _ in range(4)])) for row in tokens[:, None]])
    export(tmp_path / "run", tmp_path / "adapter")
    export(tmp_path / "run", tmp_path / "whole", merge=True)
    before = base_model(tmp_path / "hub")(tokens).logits
    assert not close(before, ours), "it was trained"
    assert close(PeftModel.from_pretrained(base_model(tmp_path / "hub"), tmp_path / "adapter")(tokens).logits, ours)
    assert close(base_model(tmp_path / "whole")(tokens).logits, ours)
    recorded = json.loads((tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()[-1])["loss"]
    assert ranks(1)(validation_loss, tmp_path / "run")[0] == pytest.approx(recorded, rel=1e-6)

    again = (f"--job.dump_folder={tmp_path}/again", f"--model.adapter={tmp_path}/adapter")
    ranks(1)(train, path, *TRAINED, *keys, *ONE_STEP, *again)
    export(tmp_path / "again", tmp_path / "returned")
    returned, sent = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("returned", "adapter"))
    assert returned.keys() == sent.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in sent.items())
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("returned", "adapter")]
    assert configs[0] == configs[1]


# A module that several layers share; experts in one tensor, beside which PEFT misreads adapters of other layers.
@pytest.mark.parametrize(("family", "read"), [("Zamba2", True), ("DeepSeek-V3", False)])
@torch.no_grad()
def test_peft_reads_an_adapter_of_a_model_of_transformers_or_the_export_warns(
    ranks: Callable[[int], RankPool], tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, read: bool
) -> None:
    base = eager_model(FAMILIES[family])
    for parameter in base.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    base.save_pretrained(tmp_path / "hub")
    keys = (*PLAIN, "--model.architecture=huggingface", f"--model.hub_checkpoint={tmp_path}/hub")
    ranks(1)(train, write_run(tmp_path), *TRAINED, *keys)
    tokens = torch.arange(40)[None] * 7 % 200
    model = load_model(open_saved_model(tmp_path / "run"), torch.device("cpu"))
    ours = model(tokens, torch.arange(40), iter([KVCache() for _ in range(3 * len(model.layers))]))
    export(tmp_path / "run", tmp_path / "adapter")
    assert not close(base(tokens).logits, ours), "it was trained"
    theirs = PeftModel.from_pretrained(base_model(tmp_path / "hub"), tmp_path / "adapter")(tokens).logits
    assert close(theirs, ours) is read
    warning = "PEFT may take the adapter of model.layers.0.mlp.gate_proj, and of all layers named gate_proj, up_"
    assert (warning not in caplog.text) is read


def test_an_adapter_of_other_settings_or_another_model_is_refused(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_base(tmp_path, "llama")
    ranks(1)(train, path, *TRAINED, *ONE_STEP)
    export(tmp_path / "run", tmp_path / "adapter")
    again = (f"--job.dump_folder={tmp_path}/again", f"--model.adapter={tmp_path}/adapter")
    for keys, wanted in {
        ("--lora.rank=8",): r"has r = 4, lora_alpha = 32.0 .*and \[lora\] has rank = 8",
        ("--lora.rank=4", "--lora.targets=['wq']"): r"which \[lora\] does not train",
        (
            "--lora.rank=4",
            "--lora.train=['norm']",
        ): r"has no base_model.model.model.layers.0.input_layernorm.weight, and",
        ("--lora.rank=4", f"--model.adapter={tmp_path}/hub"): r"has no adapter_config.json that can be read",
    }.items():
        with pytest.raises(RankFailure, match=wanted):
            ranks(1)(train, path, *ONE_STEP, *again, *keys)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(RankFailure, match=r"has use_dora = True, which \[lora\] does not have"):
        ranks(1)(train, path, *ONE_STEP, *again, "--lora.rank=4")


def test_a_run_resumes_without_the_adapter_that_it_started_from(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path, keys = write_base(tmp_path, "llama"), ("--lora.rank=4", f"--job.dump_folder={tmp_path}/again")
    ranks(1)(train, path, *TRAINED, *ONE_STEP)
    export(tmp_path / "run", tmp_path / "adapter")
    keys += (f"--model.adapter={tmp_path}/adapter",)
    ranks(1)(train, path, *keys, *ONE_STEP)
    shutil.rmtree(tmp_path / "adapter")
    assert len(ranks(1)(train, path, *keys, "--curriculum.stages[0].steps=2")[0]) == 2


def test_a_run_without_adapters_has_none_to_merge(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_base(tmp_path, "llama")
    ranks(1)(train, path, *ONE_STEP)
    with pytest.raises(ConfigError, match="has no adapters to merge"):
        export(tmp_path / "run", tmp_path / "whole", merge=True)
