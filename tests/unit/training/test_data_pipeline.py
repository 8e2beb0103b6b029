"""What the pipeline says of a stage's text, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpus_cache import BYTES
from tests.support.texts import text_corpus
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.config.data import Data, DataSource
from torchtitan_cp.config.sections import Curriculum, Stage
from torchtitan_cp.curriculum import ResolvedStage, resolve_stages
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.training.data_pipeline import DataPipeline


def pipeline_of(folder: Path, **keys: Any) -> tuple[DataPipeline, ResolvedStage]:
    sources = tuple(
        DataSource(name=name, source="text", path=str(text_corpus(folder / name)), validation_fraction=0.2)
        for name in ("books", "notes")
    )
    data = Data(sources=sources, cache_folder=str(folder / "cache"), **keys)
    stages = (Stage(seq_len=32, steps=150, global_batch_tokens=64),)
    config = replace(Config(), data=data, tokenizer=BYTES, curriculum=Curriculum(stages=stages))
    return DataPipeline(config, prepare(data, BYTES), 32), resolve_stages(config, 1)[0]


def test_a_source_that_reaches_its_max_epochs_is_reported_when_the_stage_starts_and_when_it_ends(
    tmp_path: Path,
) -> None:
    pipeline, stage = pipeline_of(tmp_path, max_epochs={"notes": 0.5})
    pipeline.start_stage(stage, Progress())
    [step] = re.findall(r"; notes reaches max_epochs in step (\d+) of the stage", pipeline.describe_stage(stage))
    assert 1 < int(step) < stage.steps
    assert "epochs)" not in pipeline.describe_epochs(int(step) - 1)
    described = pipeline.describe_epochs(int(step))
    assert re.fullmatch(r"read so far: books 0\.\d\d times, notes 0\.50 times \(its max_epochs\)", described)
    used_up = {"notes": pipeline.samples.tokens_after(stage.steps)["notes"]}
    pipeline.start_stage(stage, Progress(source_tokens=used_up))
    assert "; notes reached max_epochs before the stage" in pipeline.describe_stage(stage)


def test_what_earlier_stages_read_of_other_sources_is_said_too(tmp_path: Path) -> None:
    pipeline, stage = pipeline_of(tmp_path)
    alone = replace(stage.data, mixture={"books": 1.0}, document_mask=True, restart_positions=True)
    before = {"notes": pipeline.streams["notes"].store.tokens * 3 // 4}
    pipeline.start_stage(replace(stage, data=alone), Progress(source_tokens=before))
    assert re.fullmatch(r"read so far: books 0\.\d\d times, notes 0\.75 times", pipeline.describe_epochs(1))
    described = pipeline.describe_stage(replace(stage, data=alone))
    assert described.endswith("; documents masked; positions restart in each document")


def test_a_stage_without_limits_mentions_none(tmp_path: Path) -> None:
    pipeline, stage = pipeline_of(tmp_path)
    pipeline.start_stage(stage, Progress())
    assert pipeline.describe_stage(stage) == "; mixture books 50%, notes 50%"


def test_a_later_stage_that_max_epochs_leaves_too_little_is_refused_before_the_first_step(tmp_path: Path) -> None:
    pipeline, stage = pipeline_of(tmp_path, max_epochs={"books": 1.0, "notes": 1.0})
    read = pipeline.streams["books"].store.tokens // 64
    later = replace(stage, index=1, steps=read)
    pipeline.check_epochs([replace(stage, steps=read // 2), replace(later, steps=read // 4)], Progress())
    with pytest.raises(DataError, match=r"data\.max_epochs allows stage 2 only "):
        pipeline.check_epochs([replace(stage, steps=read), replace(later, steps=2 * read)], Progress())
    pipeline.check_epochs([replace(stage, steps=read, until={"validation_loss": 1.0}), later], Progress())
