"""The commands of `torchtitan-cp`, a file each. With train.py they alone import `models`."""
