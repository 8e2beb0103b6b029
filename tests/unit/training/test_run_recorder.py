"""What the recorder hands to the sinks."""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from torchtitan_cp.config import Config
from torchtitan_cp.config.sections import Curriculum, Stage
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.runtime.device import Device
from torchtitan_cp.training.evaluation_history import EvaluationHistory
from torchtitan_cp.training.run_recorder import RunRecorder


def test_of_prompts_that_were_not_tried_there_is_no_map() -> None:
    recorder: Any = RunRecorder.__new__(RunRecorder)
    recorder.log, recorder.history, recorder.routing = Mock(), EvaluationHistory(), None
    recorder.config = Config(curriculum=Curriculum(stages=(Stage(seq_len=1024),)))
    none, some = np.full((2, 1), np.nan), np.array([[np.nan], [0.5]])
    retrieval = {name: Retrieval(cells, (512,), (0.0, 1.0)) for name, cells in (("passkey", none), ("two", some))}
    stage: Any = SimpleNamespace(name="1K", seq_len=1024)
    recorder.record_evaluation(stage, 3, EvaluationResult(2.0, 6.0, {}, [0], [2.0], retrieval=retrieval))
    drawn = [call.args[0] for call in recorder.log.image.call_args_list]
    assert drawn == ["validation/loss_by_position", "validation/two/1K"]  # and no map of the keys by stage
    titles = [call.kwargs["title"] for call in recorder.log.image.call_args_list]
    assert titles == ["loss on held-out text, stage 1K, step 3", "% of two right, stage 1K, step 3"]


def test_within_a_stage_an_evaluation_prints_what_matters_only() -> None:
    recorder: Any = RunRecorder.__new__(RunRecorder)
    recorder.log, recorder.history, recorder.routing = Mock(), EvaluationHistory(), None
    recorder.config = Config(curriculum=Curriculum(stages=(Stage(seq_len=1024),)))
    retrieval = {"passkey": Retrieval(np.array([[0.5]]), (512,), (0.0,))}
    result = EvaluationResult(
        2.0, 6.0, {"a": 1.0, "b": 3.0}, [0], [2.0], retrieval=retrieval, left_out=("context gain",)
    )
    stage: Any = SimpleNamespace(name="1K", seq_len=1024)
    for at_end, lines in ((False, 2), (True, 5)):
        recorder.record_evaluation(stage, 3, result, at_end=at_end)
        assert len(recorder.log.say.call_args.args[0].splitlines()) == lines


def test_a_gpu_that_was_full_is_told_of_once_for_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = iter([0, 3, 3, 4])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(counts)})
    recorder: Any = RunRecorder.__new__(RunRecorder)
    recorder.allocation_retries, recorder.world = 0, SimpleNamespace(device=Device(torch.device("cuda"), "nccl"))
    for _ in range(4):
        recorder._warn_of_full_memory()
    told = [re.search(r"emptied its cache (\d) more times", line.getMessage()) for line in caplog.records]
    assert [found and found[1] for found in told] == ["3", "1"]
