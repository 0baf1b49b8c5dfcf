"""A plain table for a terminal or a file."""

import io
from collections.abc import Collection, Sequence

from trainer.observe.text import plain

_WIDTH = 200  # of a line; a terminal breaks longer ones


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Lines below a heading; columns are right-aligned but for those that are named as `left`."""
    from rich.console import Console
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(names):
        made.add_column(name, justify="left" if number in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(" ".join(plain(cell).splitlines()) for cell in row))
    text = io.StringIO()
    Console(file=text, width=_WIDTH, highlight=False, markup=False).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
