"""The TOML file: typed sections, reading, command-line overrides, and rules whose messages say how to fix a mistake.

Imports no other room and no torch, so that a mistake in a file is reported before anything heavy starts.
"""

from torchtitan_cp.config.errors import ConfigError, UserError, format_error
from torchtitan_cp.config.load import load_config, to_toml
from torchtitan_cp.config.sections import Config

__all__ = ["Config", "ConfigError", "UserError", "format_error", "load_config", "to_toml"]
