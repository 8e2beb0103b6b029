"""Memory, communication and time of a config before it is run, and a dry run of its real step on no device.

The estimate is arithmetic on the config, the shape and the attention's own plans; only `dry_run` makes tensors, and
those are fake. It may read every room, and no room knows it.
"""
