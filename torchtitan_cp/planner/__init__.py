"""Memory, communication and time of a config before it is run, and a dry run of its real step on no device.

Estimates are arithmetic on the config, the model's sizes and the plans of attention; only `dry_run` makes tensors, and
those are fake. The planner may import every room; no room imports it.
"""
