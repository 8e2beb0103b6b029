"""What a person and a script see of a run: TensorBoard, metrics.jsonl, the console, throughput.

Imports `config` at most.
"""

from torchtitan_cp.metrics.console import Console
from torchtitan_cp.metrics.record import StepRecord
from torchtitan_cp.metrics.throughput import Peak, find_peak, flops_per_token, layer_costs
from torchtitan_cp.metrics.writer import MetricsWriter

__all__ = ["Console", "MetricsWriter", "Peak", "StepRecord", "find_peak", "flops_per_token", "layer_costs"]
