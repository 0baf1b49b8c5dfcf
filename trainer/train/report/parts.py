"""What pages are made of: sections, tables, charts beside each other. All texts here are HTML."""

from collections.abc import Iterable, Sequence


def section(title: str, body: str, note: str = "") -> str:
    """A part of the page; nothing if it is empty. `title`, `body` and `note` are HTML."""
    if not body:
        return ""
    aside = f"<p>{note}</p>" if note else ""
    return (
        f'<section id="{name_of(title)}"><div class="side"><h2>{title}</h2>{aside}</div>'
        f'<div class="body">{body}</div></section>'
    )


def name_of(title: str) -> str:
    """What links to a section."""
    return title.lower().replace(" ", "-")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    wide: int | None = None,
    kind: str = "",
) -> str:
    """A table of HTML cells.

    Args:
        right: Columns of figures.
        wide: The column of sentences.
        kind: What the style calls it.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        looks: dict[int | None, str] = {wide: ' class="w"', **dict.fromkeys(right, ' class="n"')}
        kinds = (f"{tag}{looks.get(n, '')}" for n in range(len(row)))
        return "".join(f"<{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def sortable(head: Sequence[str], rows: Iterable[Sequence[str]], orders: Sequence[Sequence[int]]) -> str:
    """A table of figures whose rows are sorted by the column that is chosen, without a script.

    Args:
        head: The first column is in the order of the rows; the last ones have no order.
        orders: For each column after the first, the place of each row.
    """
    choices = [
        f'<th><label><input type="radio" name="order" id="by{n}"{" checked" * (n == 0)}>{title}</label></th>'
        for n, title in enumerate(head[: len(orders) + 1])
    ]
    choices += [f"<th>{title}</th>" for title in head[len(orders) + 1 :]]
    rules = [
        f"#key-figures:has(#by{n}:checked) tbody tr{{order:var(--by{n})}}" for n in range(1, len(orders) + 1)
    ]
    body = []
    for row, places in zip(rows, zip(*orders, strict=True), strict=True):
        style = ";".join(f"--by{n}:{place}" for n, place in enumerate(places, 1))
        first, *others = row
        cells = "".join(f'<td class="n">{cell}</td>' for cell in others)
        body.append(f'<tr style="{style}"><td>{first}</td>{cells}</tr>')
    return (
        f"<style>{''.join(rules)}</style>"
        f'<div class="scroll" tabindex="0"><table class="sortable" style="--columns:{len(head)}">'
        f"<thead><tr>{''.join(choices)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def grid(*figures: str) -> str:
    """Charts beside each other; nothing if there are none."""
    shown = [figure for figure in figures if figure]
    # Two or four stand in two columns, others in three; the first ones are wider, so that each row is full.
    kind = f"of{len(shown)}" if len(shown) in (1, 2, 4) else f"rest{len(shown) % 3}"
    return f'<div class="grid {kind}">{"".join(shown)}</div>' if shown else ""
