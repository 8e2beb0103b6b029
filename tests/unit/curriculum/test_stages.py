"""Stages: arithmetic against numbers worked out by hand."""

import dataclasses
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.data import Data, DataSource, StageData
from torchtitan_cp.config.sections import Curriculum, Stage
from torchtitan_cp.config.training import Training
from torchtitan_cp.curriculum import resolve_stages
from torchtitan_cp.curriculum.stages import resolve_stage_data

STAGES = (
    Stage(seq_len=1024, steps=10, global_batch_tokens=16384, cp=1),
    Stage(seq_len=2048, tokens=100_000, global_batch_tokens=16384, cp=-1, name="long"),
)


def test_stages_follow_each_other_and_tokens_round_up_to_steps() -> None:
    config = Config(curriculum=Curriculum(STAGES), training=Training(micro_batch_sequences=2))
    first, second = resolve_stages(config, 4)
    assert (first.name, first.steps, first.cp, first.dp) == ("1K", 10, 1, 4)
    assert first.micro_batches == 16384 // (1024 * 4 * 2)
    assert (second.name, second.steps, second.cp, second.dp) == ("long", 7, 4, 1)
    assert second.micro_batches * second.micro_batch_sequences * second.seq_len * second.dp == 16384


def test_a_stages_own_keys_rule_over_those_of_the_data_section() -> None:
    stages = (STAGES[0], dataclasses.replace(STAGES[1], data=StageData(mixture={"b": 1.0}, document_mask=False)))
    data = Data(mixture={"a": 2.0, "b": 1.0}, document_mask=True, packing="best_fit")
    first, second = resolve_stages(Config(curriculum=Curriculum(stages), data=data), 1)
    assert (first.data.mixture, first.data.document_mask, first.data.packing) == (data.mixture, True, "best_fit")
    assert (second.data.mixture, second.data.document_mask, second.data.packing) == ({"b": 1.0}, False, "best_fit")


def test_the_steps_of_a_stage_decide_its_text_only_where_its_last_window_ends_with_it() -> None:
    for packing, steps in (("best_fit", 10), ("concat", None)):
        config = Config(curriculum=Curriculum(STAGES), data=Data(packing=packing))
        assert resolve_stages(config, 4)[0].text_settings.get("steps") == steps


def test_how_conversations_are_packed_is_a_setting_of_the_text_only_where_best_fit_reads_some() -> None:
    chats = Data(source="jsonl", messages_field="messages")
    for data, expected in (
        (chats, "whole"),
        (dataclasses.replace(chats, packing="concat"), None),
        (Data(packing="best_fit"), None),
    ):
        stage = resolve_stages(Config(curriculum=Curriculum(STAGES), data=data), 4)[0]
        assert stage.text_settings.get("conversations") == expected


def test_a_stage_of_a_length_that_an_earlier_one_has_gets_a_name_of_its_own() -> None:
    stages = (STAGES[0], STAGES[1], STAGES[0], dataclasses.replace(STAGES[0], name="long"))
    names = [stage.name for stage in resolve_stages(Config(curriculum=Curriculum(stages)), 4)]
    assert names == ["1K", "long", "1K-stage-3", "long-stage-4"]


CHAT: dict[str, Any] = {"source": "jsonl", "path": "x", "messages_field": "m"}


def test_a_stage_that_reads_conversations_packs_them_whole_and_apart() -> None:
    sources = (DataSource(name="chat", **CHAT), DataSource(name="text", source="text", path="x"))

    def resolved(stage: StageData, **keys: Any) -> tuple[Any, ...]:
        found = resolve_stage_data(Data(sources=sources, **keys), Stage(data=stage))
        return found.packing, found.document_mask, found.restart_positions

    assert resolved(StageData()) == ("best_fit", True, True)
    assert resolved(StageData(mixture={"text": 1.0})) == ("concat", False, False)
    assert resolved(StageData(), mixture={"text": 1.0, "chat": 0.0}) == ("concat", False, False)
    assert resolved(StageData(mixture={"text": 1.0, "chat": 0.5})) == ("best_fit", True, True)
    assert resolved(StageData(packing="concat"), document_mask=False) == ("concat", False, False)
