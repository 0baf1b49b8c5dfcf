"""Hook of mkdocs: the version, the changelog and the notebooks as pages of the site.

A notebook has its outputs if `make notebooks` ran it: it lies then in build/notebooks, too.
"""

import json
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_RAN = ROOT / "build/notebooks"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version below each page, and the repository into the menu if REPOSITORY names it."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "trainer/version.py").read_text())
    config.copyright = f"trainer {version[1] if version else ''}"
    config.repo_url = os.environ.get("REPOSITORY")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog and the notebooks."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        ran = _RAN / path.name
        cells = json.loads((ran if ran.exists() else path).read_text())["cells"]
        parts = [
            part for number, cell in enumerate(cells) for part in _of_cell(files, config, path, number, cell)
        ]
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(parts)))
    return files


def _of_cell(
    files: Files, config: MkDocsConfig, path: Path, number: int, cell: dict[str, Any]
) -> Iterator[str]:
    """Yields a cell as Markdown; pictures become files beside the page."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"````python\n{source}\n````"
    for index, output in enumerate(cell["outputs"]):
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{path.stem}-{number}-{index}.png"
            files.append(File.generated(config, f"notebooks/{name}", content=b64decode(data["image/png"])))
            yield f"![output]({name})"
        elif text := "".join(output.get("text", data.get("text/plain", ""))).strip():
            yield f"````text\n{text}\n````"
