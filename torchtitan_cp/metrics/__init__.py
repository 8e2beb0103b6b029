"""What is recorded of a run: step records, the sinks they go to, throughput, loss by position, figures, traces.

`logger.py` hands every record to the sinks: console, metrics.jsonl (`jsonl_sink.py`), TensorBoard, Weights & Biases.
Imports `config` and `attention` at most.
"""
