"""What goes wrong with the files of a store."""


class StoreError(RuntimeError):
    """A store that cannot be read, written or used; nothing in it was changed."""
