"""What the recorder hands to the sinks."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.training.run_recorder import RunRecorder


def test_of_prompts_that_were_not_tried_there_is_no_map() -> None:
    recorder: Any = RunRecorder.__new__(RunRecorder)
    recorder.log, recorder.evaluation_curves, recorder.routing = Mock(), {}, None
    none, some = np.full((2, 1), np.nan), np.array([[np.nan], [0.5]])
    retrieval = {name: Retrieval(cells, (512,), (0.0, 1.0)) for name, cells in (("passkey", none), ("two", some))}
    stage: Any = SimpleNamespace(name="1K", seq_len=1024)
    recorder.record_evaluation(stage, 3, EvaluationResult(2.0, 6.0, {}, [0], [2.0], retrieval=retrieval))
    drawn = [call.args[0] for call in recorder.log.image.call_args_list]
    assert drawn == ["validation/loss_by_position", "validation/two/1K"]
