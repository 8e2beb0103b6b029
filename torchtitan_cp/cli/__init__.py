"""The commands of `torchtitan-cp`, a file each; `command.py` is what they share.

With train.py they alone import `models`.
"""

import sys
from pathlib import Path

# Before the current directory, which `python -m` puts first and which may have a folder models/ of its own.
# PYTHONSAFEPATH would need Python 3.11.
sys.path.insert(0, str(Path(__file__).parents[2]))
