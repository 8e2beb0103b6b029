"""What is recorded of a run: step records, the sinks they go to, throughput, loss by position, figures, traces.

`logger.py` hands every record to the sinks: console, metrics.jsonl (`jsonl_sink.py`), TensorBoard, Weights & Biases.
Imports `config` and `attention` at most.
"""

from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.step_record import StepRecord
from torchtitan_cp.metrics.throughput import Peak, find_peak, flops_per_token, layer_costs

__all__ = ["MetricsLogger", "Peak", "StepRecord", "find_peak", "flops_per_token", "layer_costs"]
