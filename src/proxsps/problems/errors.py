"""Errors of data sets, where they can be caught without loading NumPy."""


class DataError(RuntimeError):
    """Data is missing, damaged or not what it should be. The message is one line that says what to do."""
