"""Bits per byte of gzip and xz on the modules of the standard library that `gpt-stdlib` is measured on.

Both at their highest settings (gzip -9, xz -9e), with their headers, three ways: each module on its own, as a
file; all of them in one stream, with the byte 0 after each that the model has to say too; and, for xz, that
stream behind all the modules that the model learns from, of which only what it adds counts. gzip looks back
32 KiB, so for it the last would be the second.
"""

import argparse
import gzip
import lzma
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.data.builtin.stdlib import END, is_held_out, read_modules, stdlib_text
from trainer.data.formats.documents import StreamDataset
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host import strict_json
from trainer.observe.conditions import conditions
from trainer.runs.manifest import read_stored

Compress = Callable[[bytes], int]


def by_gzip(text: bytes) -> int:
    """Bytes that `gzip -9` makes of a text, without a name and a date in the header."""
    return len(gzip.compress(text, 9, mtime=0))


def by_xz(text: bytes) -> int:
    """Bytes that `xz -9e` makes of a text."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def apart(compress: Compress, documents: list[bytes]) -> float:
    """Bits per byte with each document compressed on its own."""
    return 8 * sum(map(compress, documents)) / sum(map(len, documents))


def together(compress: Compress, documents: list[bytes], known: bytes = b"") -> float:
    """Bits per byte of documents in one stream, each with its end, behind what is known already."""
    text = stream(documents)
    before = compress(known) if known else 0
    return 8 * (compress(known + text) - before) / len(text)


def stream(documents: list[bytes]) -> bytes:
    """Documents one after another, each with its end."""
    return b"".join(document + bytes([END]) for document in documents)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "run_folder", type=Path, nargs="?", metavar="RUN", help="folder of a finished run of gpt-stdlib"
    )
    bench.add_argument(
        "--target", type=float, default=2.3, metavar="BITS", help="most bits per byte (default: 2.3)"
    )
    bench.set_defaults(run=lambda options: bench_compression(options.run_folder, options.target))


def bench_compression(run: Path | None, target: float) -> int:
    """Prints the table, and a run's figure beside it.

    Args:
        run: Folder of a finished run of task=language with data.name=stdlib; None: the compressors alone.
        target: Most bits per byte that the run may need.

    Returns:
        The exit code: 1 if the run needs more.

    Raises:
        BadInputError: If the run isn't one, or was measured on other modules.
    """
    figure = None if run is None else run_figure(run)
    modules = read_modules()
    held = [text for name, text in modules.items() if is_held_out(name)]
    learned = [text for name, text in modules.items() if not is_held_out(name)]
    print(conditions())
    print(
        f"standard library of Python {platform.python_version()}: {len(held)} of {len(modules)} modules held "
        f"out, {sum(map(len, held)):,} bytes\n"
    )
    print("| bits per byte | each module alone | in one stream | behind the other modules |")
    print("|---|---|---|---|")
    print(f"| gzip -9 | {apart(by_gzip, held):.3f} | {together(by_gzip, held):.3f} | the same |")
    behind = together(by_xz, held, stream(learned))
    print(f"| xz -9e | {apart(by_xz, held):.3f} | {together(by_xz, held):.3f} | {behind:.3f} |")
    if figure is None:
        return EXIT_DONE
    print(f"| {run} | | | {figure:.3f} |\n")
    met = figure <= target
    print(f"target: at most {target:g} bits per byte: {'met' if met else 'MISSED'}")
    return EXIT_DONE if met else EXIT_FAILED


def run_figure(run: Path) -> float:
    """Bits per byte that a run reached on the modules that this Python's library holds out.

    Raises:
        BadInputError: If it didn't finish, or measured something else.
    """
    stored = read_stored(run)
    if stored is None or stored.status != "finished":
        raise BadInputError(f"{run}: no finished run; give the folder that `trainer train gpt-stdlib` named")
    summary: Any = strict_json.parse((run / "manifest.json").read_bytes())
    figure = summary.get("summary", {}).get("bits_per_byte")
    language = stored.config.get("language", {})
    if figure is None or stored.config["data"]["name"] != "stdlib" or language.get("text") != "stream":
        raise BadInputError(f"{run}: isn't a run on data.name=stdlib with language.text=stream")
    _, held = stdlib_text()
    here = StreamDataset(held.tokens, language["sequence_length"], whole=True).fingerprint()
    if stored.fingerprint.get("evaluation data") != here:
        raise BadInputError(
            f"{run}: was measured on the library of another Python; run this bench with that one"
        )
    return float(figure)
