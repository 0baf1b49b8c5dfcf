"""`trainer data`: pack, index, verify, show, stats."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, writing
from trainer.launch.signals import unwound
from trainer.observe.console import progress_bar, say, warn
from trainer.observe.text import megabytes
from trainer.runs.flags import add_settings

if TYPE_CHECKING:
    from trainer.data.left_out import LeftOut

_SPLITS, _TEST = ("train", "val"), "test"
_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Adds `data` and its subcommands to the commands."""
    data = commands.add_parser(
        "data", help="Pack, index, tokenize, verify and describe data.", allow_abbrev=False
    )
    kinds = data.add_subparsers(required=True, metavar="WHAT")

    pack = kinds.add_parser(
        "pack", help="decode, shrink and encode images once, for all epochs", allow_abbrev=False
    )
    add = pack.add_argument
    add(
        "source",
        type=Path,
        metavar="SRC",
        help="folder of classes, .csv or .parquet, indexed shards; or a folder with train and val of these",
    )
    add("target", type=Path, metavar="DST", help="new folder")
    add(
        "--short-side",
        type=int,
        metavar="N",
        help="pixels to which a larger short side shrinks (256 for 224)",
    )
    add("--quality", type=int, default=90, metavar="Q", help="quality of the JPEGs (default: 90)")
    add("--raw", action="store_true", help="store pixels: least work in training, 5 to 10 times the size")
    add(
        "--exif-orientation",
        choices=("apply", "ignore"),
        default="ignore",
        help="apply or ignore the EXIF orientation, as data.exif_orientation does (default: ignore)",
    )
    add("--processes", type=int, metavar="N", help="processes (default: CPUs of this container)")
    pack.set_defaults(run=_pack)

    tokens = kinds.add_parser(
        "tokenize", help="write the tokens of text files to one file (.bin)", allow_abbrev=False
    )
    add = tokens.add_argument
    add("source", type=Path, metavar="SRC", help="text file, or folder of them (sorted by name)")
    add("target", type=Path, metavar="DST", help="token file to write, such as train.bin")
    add(
        "--tokenizer",
        required=True,
        metavar="bytes|bpe:FILE",
        help="bytes: a token for each byte, 256 ends a document; bpe:FILE: a tokenizer.json on this machine",
    )
    add(
        "--end",
        metavar="TOKEN",
        help="token that ends a document, with bpe:FILE (default: <|endoftext|> or the like)",
    )
    add(
        "--files",
        default="**/*",
        metavar="PATTERN",
        help="pattern of files below SRC, such as '**/*.txt' (default: all that aren't hidden)",
    )
    add("--force", action="store_true", help="replace DST if it is there")
    tokens.set_defaults(run=_tokenize)

    index = kinds.add_parser(
        "index", help="index tar shards, to serve them by https or s3", allow_abbrev=False
    )
    add = index.add_argument
    add("folder", type=Path, metavar="DIR", help="folder with .tar files, or with train and val of these")
    add(
        "--image",
        default="",
        metavar="SUFFIX",
        help="suffix of the image, if samples have two (an image and a mask)",
    )
    index.set_defaults(run=_index)

    verify = kinds.add_parser(
        "verify",
        help="compare every sample with its hash, and keep the hashes of new samples",
        allow_abbrev=False,
    )
    add = verify.add_argument
    add(
        "what", metavar="DIR|RECIPE", help="SRC of pack, a pack, tokens.bin, or a recipe whose data are files"
    )
    add_settings(verify)
    verify.set_defaults(run=_verify)

    show = kinds.add_parser("show", help="print samples of text as the model sees them", allow_abbrev=False)
    add = show.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    add_settings(show)
    add("--samples", type=int, default=3, metavar="N", help="number of samples (default: 3)")
    show.set_defaults(run=_show)

    stats = kinds.add_parser("stats", help="print counts, sizes, cost, mean and std", allow_abbrev=False)
    add = stats.add_argument
    add("source", type=Path, metavar="SRC", help="SRC of pack, or a pack")
    add("--json", action="store_true", help="print JSON")
    stats.set_defaults(run=_stats)


def _parts(source: Path) -> list[tuple[str, Path]]:
    """Lists the splits of a data set with their paths, or the path itself under an empty name."""
    found = []
    for split in (*_SPLITS, _TEST):
        names = (split, f"{split}.parquet", f"{split}.csv")
        found += [(split, source / name) for name in names if (source / name).exists()][:1]
    tests = [path for split, path in found if split == _TEST]  # which may be a class, or without classes
    found = found[: len(found) - len(tests)]
    if found and tests:
        warn(f"{tests[0]}: isn't looked at; name it alone, as it isn't a part that a run reads")
    if not source.exists():
        raise BadInputError(f"{source}: no such file or folder; give the data's path, as data.path has it")
    beside = {entry.name for entry in source.iterdir() if entry.is_dir()} if found else set[str]()
    if odd := sorted(beside - {*_SPLITS, _TEST}):
        raise BadInputError(
            f"{source}: is '{found[0][0]}' a part of the data or a class like '{odd[0]}' beside it? "
            "Put the classes into a folder train, or name one part alone"
        )
    return found or [("", source)]


def _open(source: Path) -> Any:
    from trainer.data.formats.files import in_folder
    from trainer.data.formats.index import index_folder
    from trainer.data.formats.sharded import INDEX, in_shards
    from trainer.data.formats.tables import in_table
    from trainer.data.formats.tar_shards import in_tars, tar_files

    if source.suffix in (".csv", ".parquet"):
        return in_table(source, indexes=index_folder(None))
    if (source / INDEX).exists():
        return in_shards(source)
    return in_tars(source, index_folder(None)) if tar_files(source)[0] else in_folder(source)


def _tokenize(options: argparse.Namespace) -> int:
    from trainer.data.formats.tokenize import list_files, tokenize, unread_files
    from trainer.data.left_out import held_out

    about = tokenize(
        options.source, options.target, options.tokenizer, options.end, options.files, options.force
    )
    say(
        f"{options.target}: {about.tokens:,} tokens ({about.dtype}) of {about.documents:,} files, "
        f"vocabulary {about.vocabulary:,}"
    )
    if about.unknown:
        say(f"  {about.unknown:,} of them stand for what the vocabulary lacks")
    _tell_left_out(unread_files(options.source, options.files))
    files = list_files(options.source, options.files) if options.source.is_dir() else ()
    if name := held_out({file.relative_to(options.source).parts[0] for file in files}):
        warn(f"{options.source / name}: looks like evaluation data, and is in {options.target} with the rest")
    return EXIT_DONE


@unwound()
def _pack(options: argparse.Namespace) -> int:
    from trainer.data.formats.labels import joined_classes
    from trainer.data.formats.pack import PackSettings, pack
    from trainer.host.limits import read_limits

    if options.short_side is not None and not 8 <= options.short_side <= 16384:
        raise BadInputError(f"--short-side {options.short_side}: give 8 to 16384 pixels")
    if not 1 <= options.quality <= 95:
        raise BadInputError(f"--quality {options.quality}: give 1 to 95")
    processes = max(1, int(read_limits().cpus)) if options.processes is None else options.processes
    if processes < 1:
        raise BadInputError(f"--processes {processes}: give a number from 1 on")
    settings = PackSettings(options.short_side, options.quality, options.raw)
    for split, source in _parts(options.source):
        target = options.target / split if split else options.target
        records = _open(source)
        records.upright = options.exif_orientation == "apply"
        with writing(str(target)), progress_bar(f"packing {source}", len(records)) as advance:
            about, unreadable = pack(records, target, settings, processes, advance)
        size = sum(shard.bytes for shard in about.shards)
        say(f"{target}: {about.samples:,} samples, {megabytes(size)} in {len(about.shards)} shards")
        _tell_left_out(about.left_out)
        for line in joined_classes(about.classes):
            say(f"  {line}")
        if len(unreadable):
            say(f"  {_unreadable(records, unreadable)}")
    say(f"  train on it with --set data.name=pack --set data.path={options.target}")
    return EXIT_DONE


def _unreadable(records: Any, samples: Any) -> str:
    """Says how many samples of a pack are stored undecoded, and why the first is."""
    from trainer.data.corrupt import Corrupt
    from trainer.data.formats.decode import decode_whole

    first, reason = int(samples[0]), ""
    try:
        decode_whole(records.read(first), records.upright)
    except Corrupt as error:
        reason = f" ({error})"
    return (
        f"{len(samples):,} of {len(records):,} can't be decoded and are stored as they were; the first: "
        f"{records.name(first)}{reason}"
    )


def _index(options: argparse.Namespace) -> int:
    from trainer.data.formats.tar_shards import index_shards, tar_files

    for _, folder in _parts(options.folder):
        total = sum(file.stat().st_size for file in tar_files(folder)[0])
        with writing(str(folder)), progress_bar(f"indexing {folder}", total) as advance:
            about = index_shards(folder, advance, options.image)
        classes = len(about.classes)
        say(f"{folder}: {about.samples:,} samples, {classes} classes, {len(about.shards)} shards")
        _tell_left_out(about.left_out)
    say("  this is for shards behind a URL: a run on a folder of them makes its own index, and keeps it")
    return EXIT_DONE


def _tell_left_out(found: Sequence["LeftOut"]) -> None:
    from trainer.data.left_out import left_out_line

    if line := left_out_line(found):
        say(f"  {line}")


def _verify(options: argparse.Namespace) -> int:
    from trainer.data.formats.index import index_folder, known_hashes
    from trainer.data.formats.stats import damaged

    path = Path(options.what)
    if path.suffix == ".bin":
        return _verify_tokens(path)
    bad = 0
    for name, records, index in _to_verify(options, path):
        file = None if (indexed := hasattr(records, "about")) else records.keep_hashes(index, make=True)
        if not (indexed or file):
            raise BadInputError(f"{index_folder(index)}: hashes can't be kept there; give data.index=DIR")
        known = known_hashes(file) if file else 0
        with progress_bar(f"verifying {name}", len(records)) as advance:
            lines = list(damaged(records, advance))
        for line in lines[:_SHOWN]:
            say(line)
        if len(lines) > _SHOWN:
            say(f"… and {len(lines) - _SHOWN:,} more")
        when = "indexed" if indexed else "first read"
        say(f"{name}: {len(records) - len(lines):,} of {len(records):,} samples are as they were {when}")
        if file:
            say(f"  {(now := known_hashes(file)) - known:,} of them were read for the first time: {file}")
            if (lost := len(records) - len(lines) - now) > 0:
                raise BadInputError(
                    f"{file}: the hashes of {lost:,} samples can't be kept; is the disk full?"
                )
        _tell_left_out(records.left_out)
        bad += len(lines)
    return EXIT_FAILED if bad else EXIT_DONE


def _to_verify(options: argparse.Namespace, path: Path) -> Iterator[tuple[str, Any, Path | None]]:
    """Yields name and records of each part, and data.index."""
    if path.is_dir() or path.suffix in (".csv", ".parquet"):
        if options.set:
            raise BadInputError(f"{options.set[0]}: keys go with a recipe, and {path} is data")
        yield from ((str(folder), _open(folder), None) for _, folder in _parts(path))
        return
    if not path.exists() and path.parent != Path():
        raise BadInputError(f"{path}: no such folder or file")
    from trainer.config.recipe_file import provisional
    from trainer.train.components.task import make_task

    recipe, _ = provisional(options.what, options.set)
    task = make_task(recipe)
    for name, data in (("train", task.train_data), ("val", task.evaluation_data)):
        records = getattr(data, "records", None)
        if records is None:
            raise BadInputError(f"data.name={recipe.data.name}: has no samples in files to verify")
        yield name, records, recipe.data.index


def _verify_tokens(file: Path) -> int:
    from trainer.data.formats.tokens import verify_tokens

    with progress_bar(f"verifying {file}", file.stat().st_size if file.exists() else 0) as advance:
        about = verify_tokens(file, advance)
    say(f"{file}: {about.tokens:,} tokens are as they were written")
    return EXIT_DONE


def _show(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import provisional

    if options.samples < 1:
        raise BadInputError(f"--samples {options.samples}: give a number from 1 on")
    recipe, _ = provisional(options.recipe, options.set)
    from trainer.commands.data.show import shown_samples

    for line in shown_samples(recipe, options.samples):
        say(line)
    return EXIT_DONE


def _stats(options: argparse.Namespace) -> int:
    from trainer.data.formats.stats import LOOKED_AT, statistics

    found, opened = {}, {}
    for split, source in _parts(options.source):
        records = opened[split] = _open(source)
        with progress_bar(f"decoding {source}", min(len(records), LOOKED_AT)) as advance:
            found[split or str(source)] = statistics(records, advance)
    if options.json:
        print(json.dumps({name: _plain(figures) for name, figures in found.items()}, indent=1))
        return EXIT_DONE
    from rich.console import Console
    from rich.table import Table

    table = Table("", *found)
    for row in next(iter(found.values()))._fields:
        if row not in ("unreadable", "left_out"):
            cells = (_shown(getattr(figures, row)) for figures in found.values())
            table.add_row(row.replace("_", " "), *cells)
    Console(markup=False, emoji=False).print(table)  # a path may hold what rich takes for these
    say("smallest / median / largest; mean and std are of each channel, on the scale 0 to 1")
    for line in (line for figures in found.values() for line in figures.unreadable):
        say(line)
    from trainer.data.left_out import left_out_lines
    from trainer.data.sources import twin_notes

    both = twin_notes(opened["train"], opened["val"]) if {"train", "val"} <= opened.keys() else ()
    for line in (*left_out_lines({name: figures.left_out for name, figures in found.items()}), *both):
        say(line)
    return EXIT_DONE


def _plain(figures: Any) -> dict[str, Any]:
    plain = {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name, value in figures._asdict().items()
    }
    return {**plain, "left_out": [one.model_dump() for one in figures.left_out]}


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return " / ".join(f"{number:,.10g}" for number in value)
