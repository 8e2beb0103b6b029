"""What can be wrong with a corpus, a tokenizer or the cache of both."""

from torchtitan_cp.config import UserError


class DataError(UserError):
    """The corpus, the tokenizer or the cache folder cannot be used as the config says."""
