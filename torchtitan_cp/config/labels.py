"""The label that training data, the loss and evaluation agree on."""

IGNORED = -100  # a token that no loss counts; torch's cross_entropy ignores it by default
