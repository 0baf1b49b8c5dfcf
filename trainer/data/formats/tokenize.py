"""Tokenization of text files to a token file, in bounded memory; each file is a document."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.data.formats.encoders import encoded, read_tokenizer
from trainer.data.formats.files import size_of
from trainer.data.formats.tokens import TokenFile, about_path
from trainer.data.left_out import LeftOut, one, tally
from trainer.errors import BadInputError, reading, writing
from trainer.host import strict_json
from trainer.host.files import remove_unfinished, written_whole
from trainer.observe.console import progress_bar

_Advance = Callable[[int], object]

_CHUNK = 1 << 20


def tokenize(
    source: Path,
    target: Path,
    tokenizer: str,
    end: str | None = None,
    pattern: str = "**/*",
    force: bool = False,
) -> TokenFile:
    """Writes a token file and the JSON file beside it, whose content it returns.

    If the process is killed, earlier files remain, or at worst a complete token file without its JSON file,
    which is refused as its dtype is unknown.

    Args:
        source: Text file, or folder of text files, which are read in the order of their names.
        target: The token file.
        tokenizer: "bytes", or "bpe:" and the path of a tokenizer.json.
        end: Token that ends a document, for "bpe:"; None: the usual one.
        pattern: Glob pattern of files in the folder; hidden ones are left out.
        force: True to replace existing files.

    Raises:
        BadInputError: If a file can't be read or written, isn't UTF-8 (except for "bytes"), or the target
            exists.
    """
    encoder = read_tokenizer(tokenizer, end)
    about = about_path(target)
    for path in (target, about):
        if path.is_dir() or (path.exists() and not force):
            raise BadInputError(f"{path}: is there already; give another name, or --force for a file")
    files = list_files(source, pattern)
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise BadInputError(f"{target}: lies in what is to be tokenized; put it elsewhere")
    dtype: Literal["uint16", "uint32"] = "uint16" if encoder.vocabulary <= 1 << 16 else "uint32"
    read, written, size, unknown = hashlib.sha256(), hashlib.sha256(), 0, 0
    with writing(str(target), "give another place"):
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in (target, about):
            remove_unfinished(path.parent, path.stem)  # of a killed process
        with written_whole(about) as beside, written_whole(target) as made:
            with (
                made.open("wb") as file,
                progress_bar(f"tokenizing {source}", sum(map(size_of, files))) as advance,
            ):
                documents = ((path, _chunks(path, source, read, advance)) for path in files)
                for part in encoded(documents, encoder, dtype):
                    written.update(part)
                    size += file.write(part)
                    if encoder.unknown not in (None, encoder.end):
                        unknown += int((np.frombuffer(part, dtype) == encoder.unknown).sum())
            facts = TokenFile(
                dtype=dtype,
                vocabulary=encoder.vocabulary,
                tokens=size // (2 if dtype == "uint16" else 4),
                documents=len(files),
                unknown=unknown,
                end_of_document=encoder.end,
                tokenizer=encoder.name,
                tokenizer_sha256=encoder.sha256,
                source=f"{len(files)} files {read.hexdigest()[:16]}",
                sha256=written.hexdigest(),
            )
            beside.write_bytes(strict_json.dump(facts.model_dump()) + b"\n")
            # Removed first and written last: a token file without it is refused, with a wrong one misread.
            about.unlink(missing_ok=True)
    return facts


def list_files(source: Path, pattern: str) -> Sequence[Path]:
    """Returns the files to be tokenized, sorted by the bytes of their names.

    Raises:
        BadInputError: If there are none.
    """
    if not source.is_dir():
        if not source.is_file():
            raise BadInputError(f"{source}: no such text file or folder")
        return [source]
    try:
        matching = [file for file in source.glob(pattern) if not file.is_dir()]
    except (ValueError, NotImplementedError) as error:
        raise BadInputError(f"--files {pattern}: {error}; give a pattern such as '**/*.txt'") from error
    files = [file for file in matching if not _is_hidden(file, source)]
    if not files:
        raise BadInputError(f"{source}: no files that match {pattern}; choose others with --files")
    for file in files:
        if not file.is_file():
            raise BadInputError(f"{file}: isn't a file, or is a link to nothing; leave it out with --files")
    return sorted(files, key=os.fsencode)


def unread_files(source: Path, pattern: str) -> tuple[LeftOut, ...]:
    """Returns what `list_files` leaves out: hidden files, and links to folders, which `**` doesn't enter."""
    if not source.is_dir():
        return ()
    files = sorted(file for file in source.glob(pattern) if not file.is_dir())
    links = (each for each in sorted(source.rglob("*")) if each.is_symlink() and each.is_dir())
    found = [("hidden file{s}", file) for file in files if _is_hidden(file, source)]
    found += [("link{s} to a folder", link) for link in links if all(link not in f.parents for f in files)]
    return tally(one(reason, str(each.relative_to(source))) for reason, each in found)


def _is_hidden(file: Path, source: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(source).parts)


def _chunks(file: Path, source: Path, read: Any, advance: _Advance) -> Iterator[bytes]:
    """Yields the content of a file in chunks; at its end, adds its name and hash to the digest `read`."""
    content = hashlib.sha256()
    with reading(file, "leave it out with --files"):
        # O_NONBLOCK: opening a FIFO without a writer would block.
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb", buffering=0) as opened:
            while chunk := opened.read(_CHUNK):
                content.update(chunk)
                advance(len(chunk))
                yield chunk
    name = os.fsencode(file.relative_to(source))
    read.update(b"%d %s" % (len(name), name) + content.digest())
