"""HF <-> Megatron weights: names, slices, loading, export, version directories; no optimizer state and no transport.

Importing this package imports neither torch nor Megatron: import the module that you need.
"""


class WeightsError(RuntimeError):
    """A checkpoint cannot be read, does not fit the model, or cannot be written; the message says what to do."""
