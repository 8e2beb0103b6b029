"""The tokenizer of a run that starts from model.hub_checkpoint: the checkpoint's own, or one of the same vocabulary."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models import ARCHITECTURES
from tests.support.chats import write_llama_model, write_tokenizer
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.runs import TINY, write_run
from torchtitan_cp.cli.check import check_run
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.load import to_toml
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.preflight import check_hub_tokenizer
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import with_defaults


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A config without [tokenizer] that starts from a checkpoint without a tokenizer."""
    register(ARCHITECTURES)
    eager_model(FAMILIES["Llama"] | {"vocab_size": 440}).save_pretrained(tmp_path / "hub")
    lines = [line for line in TINY.splitlines() if not line.startswith(("overrides", "[tokenizer]", 'kind = "bytes"'))]
    ours = f'architecture = "huggingface"\nhub_checkpoint = "{tmp_path}/hub"'
    return write_run(tmp_path, "\n".join(lines).replace('flavor = "debug"', ours))


def resolved(path: Path, *overrides: str) -> Config:
    return with_defaults(load_config(path, overrides))


def test_the_checkpoint_brings_its_tokenizer_and_the_resolved_config_names_it(path: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    assert resolved(path).tokenizer == Tokenizer()
    write_llama_model(hub / "tokenizer.model")
    assert resolved(path).tokenizer == Tokenizer("sentencepiece", f"{hub}/tokenizer.model")
    write_tokenizer(hub)
    assert resolved(path, "--tokenizer.bos=false").tokenizer == Tokenizer("huggingface", f"{hub}/tokenizer.json", False)
    config = resolved(path)
    assert "steps on 1 rank" in check_run(load_config(path, []), 1)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert resolved(tmp_path / "again.toml") == config
    assert "steps on 1 rank" in check_run(load_config(tmp_path / "again.toml", []), 1)
    assert sized_model_args(load_config(path, ["--model.load_weights=false"])).vocab_size == 440
    for named in ("--tokenizer.kind=bytes", "--tokenizer.vocab_size=500"):
        assert resolved(path, named).tokenizer == load_config(path, [named]).tokenizer


def test_the_tokenizer_of_a_name_on_the_hub_is_found_and_found_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path / "hub")
    snapshot, downloads = tmp_path / "snapshots" / "abc", []

    def download(name: str, allow_patterns: list[str]) -> str:
        downloads.append(name)
        shutil.copytree(tmp_path / "hub", snapshot, dirs_exist_ok=True)
        return str(snapshot)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    config = resolved(path, "--model.hub_checkpoint=someone/small")
    assert config.tokenizer == Tokenizer("huggingface", f"{snapshot}/tokenizer.json")
    check_hub_tokenizer(config)
    shutil.rmtree(snapshot)  # as on another machine, where the run is exported
    assert tokenizer_of(config).vocab_size == 420
    assert set(downloads) == {"someone/small"}


def test_weights_go_on_with_a_tokenizer_of_the_same_vocabulary_only(path: Path, tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "hub")
    chat = Path(shutil.copy(own, tmp_path / "chat.json"))
    named = ["--tokenizer.kind=huggingface", f"--tokenizer.path={chat}"]
    check_hub_tokenizer(resolved(path, *named))
    added = json.loads(own.read_text())
    added["added_tokens"][-1]["content"] = "<|tool|>"
    chat.write_text(json.dumps(added))
    check_hub_tokenizer(resolved(path, *named))
    other = json.loads(own.read_text())
    vocabulary = other["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    chat.write_text(json.dumps(other))
    with pytest.raises(ConfigError) as caught:
        check_run(load_config(path, named), 1)
    assert f"the tokenizer '{chat}' is not that of model.hub_checkpoint, {own}: 2 ids mean other text" in str(
        caught.value
    )
    assert "the first of them 100\n  fix: leave out tokenizer.kind and tokenizer.path" in str(caught.value)
    with pytest.raises(ConfigError, match=r"the tokenizer bytes is not that of model\.hub_checkpoint"):
        check_hub_tokenizer(resolved(path, "--tokenizer.kind=bytes"))
    assert "steps on 1 rank" in check_run(load_config(path, [*named, "--model.load_weights=false"]), 1)
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    assert "steps on 1 rank" in check_run(load_config(path, named), 1), "of a run that goes on"


def test_either_tokenizer_of_a_checkpoint_is_its_own_and_without_one_any_goes(path: Path, tmp_path: Path) -> None:
    named = ["--tokenizer.kind=sentencepiece", f"--tokenizer.path={tmp_path}/hub/tokenizer.model"]
    write_llama_model(tmp_path / "hub" / "tokenizer.model")
    write_tokenizer(tmp_path / "hub")
    check_hub_tokenizer(resolved(path, *named))
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / "hub" / name).unlink()
    check_hub_tokenizer(resolved(path, "--tokenizer.kind=bytes"))
    train_sentencepiece([Path(__file__).read_text()], 400, tmp_path / "own.model")
    check_hub_tokenizer(resolved(path, f"--tokenizer.path={tmp_path}/own.model"))


def test_a_tokenizer_of_the_corpus_is_never_trained_for_given_embeddings(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(load_config(path, []), 1)
    message = str(caught.value)
    assert "its folder has neither tokenizer.json nor tokenizer.model, and [tokenizer] names none" in message
    assert "fix: put that tokenizer into the folder, or name it by tokenizer.kind and tokenizer.path, or set" in message
    write_tokenizer(tmp_path / "hub")
    with pytest.raises(ConfigError) as caught:
        check_hub_tokenizer(resolved(path, "--tokenizer.vocab_size=300"))
    assert "are of its own tokenizer, and [tokenizer] asks for one that is trained on the corpus" in str(caught.value)
    assert "fix: leave out tokenizer.vocab_size = 300, or set model.load_weights" in str(caught.value)
    assert "steps on 1 rank" in check_run(
        load_config(path, ["--tokenizer.vocab_size=300", "--model.load_weights=false"]), 1
    )
