"""How bad input is refused: held by its exit code, one line, and names; never by wording."""

from pathlib import Path


def refused(code: int, error: str, *names: str, folder: Path | None = None) -> str:
    """Checks a refusal, and returns its line.

    Args:
        code: The exit code: 2.
        error: What stands on standard error: one line.
        names: What the line must contain: keys, files, tensors, values.
        folder: The run folder, which mustn't be there.
    """
    assert code == 2, error
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert not [name for name in names if name not in error], error
    assert folder is None or not folder.exists(), f"{folder} is left: {error}"
    return error
