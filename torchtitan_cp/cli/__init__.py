"""The commands of `torchtitan-cp`, one file each; `command.py` and `options.py` hold what they share.

Only these and train.py import `models`.
"""

import sys
from pathlib import Path

# Before the current directory, which `python -m` puts first and which may have a folder models/ of its own.
# PYTHONSAFEPATH would need Python 3.11.
sys.path.insert(0, str(Path(__file__).parents[2]))
