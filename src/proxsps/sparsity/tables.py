"""Tables that print well with and without rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxsps._install import require


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns; numbers are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def __str__(self) -> str:
        cells = [list(map(_text, row)) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        right = self._numeric()
        lines = [self.title] if self.title else []
        for row in (list(self.columns), ["-" * width for width in widths], *cells):
            padded = [
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, right, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD)
        for name, number in zip(self.columns, self._numeric(), strict=True):
            # Names break between words only.
            longest = max(map(len, name.split()), default=0)
            table.add_column(name, justify="right" if number else "left", overflow="fold", min_width=longest)
        for row in self.rows:
            table.add_row(*map(_text, row))
        return table

    def show(self) -> None:
        """Print the table: by rich if it is installed, else as plain text."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)  # noqa: T201
            return
        Console(highlight=False).print(self)

    def frame(self) -> Any:
        """The same as a pandas DataFrame."""
        require("A table as a data frame", "sparsity", "pandas")
        import pandas

        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def _numeric(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return [bool(column) and all(isinstance(cell, (int, float)) for cell in column) for column in columns]


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
