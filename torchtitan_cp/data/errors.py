"""What can go wrong with a corpus, a tokenizer or their cache."""

from torchtitan_cp.config import UserError


class DataError(UserError):
    """The corpus, the tokenizer or the cache folder cannot be used as the config says."""


class PreparationStoppedError(Exception):
    """A stop was requested while the corpus was prepared; the message says what is kept."""
