"""Confusion matrix as SVG."""

from collections.abc import Iterable, Sequence

from trainer.observe.text import escaped

MOST_DRAWN = 200  # classes in a picture, which is 6 MB then
_CELL, _LETTER, _MOST_LETTERS = 18, 6, 20  # pixels of the picture; letters of a class's name


def confusion_chart(confusion: Iterable[Sequence[int]], classes: Sequence[str]) -> str:
    """Draws the confusion matrix as SVG: a row for each true class, darker for larger fractions of it."""
    matrix = [[0] * len(classes) for _ in classes]
    for true, taken_for, count in confusion:
        matrix[true][taken_for] = count
    names = [name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…" for name in classes]
    margin = 30 + _LETTER * max(map(len, names))
    size = max(margin + _CELL * len(classes) + 10, 220)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{size}" height="{size}" fill="#ffffff"/>',
        '<text x="4" y="12" fill="#555555">predicted (across), true (down)</text>',
    ]
    for row, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        middle = margin + row * _CELL + _CELL / 2
        label = escaped(name)
        parts.append(f'<text x="{margin - 4}" y="{middle + 3:g}" text-anchor="end">{label}</text>')
        parts.append(f'<text transform="translate({middle + 3:g} {margin - 4}) rotate(-90)">{label}</text>')
        for column, count in enumerate(counts):
            share = count / max(1, sum(counts))
            x, y = margin + column * _CELL, margin + row * _CELL
            fill = f"hsl(231 60% {97 - 60 * share:.0f}%)"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{fill}">'
                f"<title>{label} as {escaped(classes[column])}: {count}</title></rect>"
            )
            if count and len(classes) <= 20:
                ink = "#ffffff" if share > 0.5 else "#222222"
                parts.append(
                    f'<text x="{x + _CELL / 2 - 0.5:g}" y="{y + _CELL / 2 + 3:g}" text-anchor="middle" '
                    f'font-size="7" fill="{ink}">{count}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])
