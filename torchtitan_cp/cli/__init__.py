"""The commands of `torchtitan-cp`, a file each; `command.py` is what they share.

With train.py they alone import `models`.
"""
