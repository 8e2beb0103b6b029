"""The config with which a checkpoint is evaluated, and which checkpoints are in Hugging Face's format."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from tests.support.runs import TINY, write_run
from torchtitan_cp.cli.evaluate import HUB_TOKENS, evaluation_config, is_hub_checkpoint, open_hub_checkpoint
from torchtitan_cp.config import load_config
from torchtitan_cp.config.check import check_config
from torchtitan_cp.config.training import Lora
from torchtitan_cp.curriculum import resolve_stages


def test_a_run_with_a_warm_up_longer_than_its_number_of_stages_can_be_evaluated(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, TINY), ["--lr_scheduler.warmup_steps=2"])
    options = Namespace(tokens=None, variants=None, lengths=None, trials=None)
    evaluated = evaluation_config(config, 1, options)
    check_config(evaluated, resolve_stages(evaluated, 1), 1)


def test_a_folder_with_a_config_json_and_a_name_on_the_hub_are_in_hugging_faces_format(tmp_path: Path) -> None:
    assert not is_hub_checkpoint(tmp_path)
    assert not is_hub_checkpoint(tmp_path / "missing" / "folder")
    assert is_hub_checkpoint(Path("owner/name"))
    (tmp_path / "config.json").write_text("{}")
    assert is_hub_checkpoint(tmp_path)


def test_without_a_config_the_standard_library_is_read_at_the_checkpoints_length(tmp_path: Path) -> None:
    for positions, length in ((512, 512), (131072, HUB_TOKENS)):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
        found = open_hub_checkpoint(f"{tmp_path}/", None)
        assert found.stage.seq_len == length
        assert (found.config.data.source, found.config.model.architecture) == ("python-stdlib", "huggingface")
        assert (found.name, found.run_folder, found.step) == (tmp_path.name, Path(), 0)
        assert f"longer than the {length} tokens" in found.length_note


def test_a_config_gives_text_and_lengths_and_neither_rope_nor_a_tokenizer_that_the_checkpoint_has(
    tmp_path: Path,
) -> None:
    text = load_config(write_run(tmp_path, TINY + "rope = {{theta = 5.0}}\n"))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    found = open_hub_checkpoint(str(tmp_path), text)
    assert (found.stage.seq_len, found.stage.rope) == (128, None)
    assert (found.config.data, found.config.tokenizer) == (text.data, text.tokenizer)
    assert (found.config.model.flavor, found.config.model.overrides) == ("", {})
    (tmp_path / "tokenizer.model").write_text("")
    assert open_hub_checkpoint(str(tmp_path), text).config.tokenizer.kind == "sentencepiece"
    adapted = open_hub_checkpoint(str(tmp_path), replace(text, lora=Lora(base="nf4")))
    assert adapted.config.lora is None, "its weights are evaluated as they are"
    starts = text.with_keys(model={"hub_checkpoint": "elsewhere"})
    assert open_hub_checkpoint(str(tmp_path), starts).config.model.architecture == "llama"
