"""What the evaluations of a run found so far, those of earlier starts included, to compare the next one with."""

import numpy as np

from torchtitan_cp.evaluation.reach import Reach, describe_reach, found_far_back, reach_map
from torchtitan_cp.evaluation.result import Baseline, Retrieval
from torchtitan_cp.metrics.jsonl_sink import EvaluationLine

START = "step 0"  # how figures name the evaluation before the first step
Curves = dict[str, tuple[list[int], list[float | None]]]  # name -> (first positions of bins, mean losses)


class EvaluationHistory:
    """The last evaluation of each stage, and the one at step 0.

    Attributes:
        curves: losses by position, by the name of the stage, or START.
        reach: how far back keys are found, by the same names, where it was asked.
        baseline: what step 0 had; None: it was not evaluated.
    """

    def __init__(self) -> None:
        self.curves: Curves = {}
        self.reach: dict[str, Reach] = {}
        self.baseline: Baseline | None = None

    def add(self, line: EvaluationLine) -> str:
        """Add an evaluation, as evaluation.jsonl has it, and return its name."""
        name = line["stage"] if line["step"] else START
        passkey = line["retrieval"].get("passkey")
        retrieval = Retrieval.of_lists(**passkey) if passkey else None
        self.curves[name] = (line["position_starts"], line["position_losses"])
        if not line["step"]:
            self.baseline = Baseline(line["loss"], line["by_source"], retrieval)
        if retrieval and (found := found_far_back(retrieval)):
            self.reach[name] = Reach(name, line["seq_len"] if line["step"] else 0, found)
        return name

    def reach_map(self) -> tuple[list[tuple[str, int]], list[int], np.ndarray]:
        """Name and length of each row, the lengths of prompts, and the fractions of keys found, `[rows, lengths]`."""
        rows = list(self.reach.values())
        return [(row.stage, row.seq_len) for row in rows], *reach_map(rows)

    def describe_reach(self) -> str:
        """What the map means for the stages; empty without any."""
        stages = [row for row in self.reach.values() if row.stage != START]
        return describe_reach(stages) if stages else ""
