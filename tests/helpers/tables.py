"""Tables of Markdown that commands print."""


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row, without the head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
