"""What goes wrong with the files of a store."""

MAKE_ROOM = "Make room, or choose another folder with --out; what was stored before is kept."


class StoreError(RuntimeError):
    """A store that cannot be read, written or used; nothing in it was changed."""
