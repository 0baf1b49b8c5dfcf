"""Formats of data: one table, from which the schema, the readers, the doctor and the documentation derive."""

from typing import Literal, NamedTuple


class Format(NamedTuple):
    """Kind of data, by its name in `data.name`.

    Attributes:
        tasks: The tasks that read it; a task's first format is the one of a recipe that names none.
        about: Description, and the content of data.path, for the configuration page.
        place: Where it lies: nowhere (it is in the package, or drawn), at a local path, or also behind a URL.
        workers: True if loader workers read it; else it is in memory, or read where it is used.
        splits: True if an evaluation set may name one of its splits.
        opens: "module:function" that opens one split of labeled images: called with the section data, the
            path and the split, it returns `Records`. Empty where the task opens the format itself.
        gaps: True if classes are numbers, some of which may have no sample.
    """

    tasks: tuple[str, ...]
    about: str
    place: Literal["nowhere", "path", "path or URL"] = "path"
    workers: bool = True
    splits: bool = False
    opens: str = ""
    gaps: bool = True


FORMATS = {
    "digits": Format(("classification",), "embedded images", "nowhere", workers=False),
    "stdlib": Format(("language",), "embedded text", "nowhere", workers=False),
    "dtmf": Format(("audio",), "embedded sounds", "nowhere", workers=False),
    "digits-canvas": Format(("detection",), "embedded images with boxes", "nowhere", workers=False),
    "synthetic": Format(
        ("classification", "language", "audio", "detection"), "random", "nowhere", workers=False
    ),
    "folder": Format(
        ("classification", "audio"),
        "images or recordings in train/CLASS and val/CLASS",
        splits=True,
        opens="trainer.data.formats.files:folder_split",
        gaps=False,
    ),
    "table": Format(
        ("classification",),
        "images by train.csv and val.csv, or .parquet, with path and label",
        splits=True,
        opens="trainer.data.formats.tables:table_split",
    ),
    "shards": Format(
        ("classification",),
        "tar files; behind a URL, after `trainer data index`",
        "path or URL",
        splits=True,
        opens="trainer.data.formats.tar_shards:tars_split",
    ),
    "pack": Format(
        ("classification",),
        "made by `trainer data pack`",
        "path or URL",
        splits=True,
        opens="trainer.data.formats.sharded:sharded_split",
    ),
    "cifar10": Format(("classification",), "its binary version", workers=False),
    "tokens": Format(
        ("language",), "train.bin and val.bin, by `trainer data tokenize`", workers=False, splits=True
    ),
    "text": Format(("language",), "a file, by characters", workers=False),
    "conversations": Format(
        ("language",),
        "rows of messages, of prompt and completion, or of text: .jsonl, .parquet, or by save_to_disk",
        workers=False,
        splits=True,
    ),
    "coco": Format(
        ("detection",),
        "images with boxes: annotations/instances_train.json and train/, the same with val",
        splits=True,
    ),
    "hf": Format(
        ("classification", "language"),
        "a folder that save_to_disk of Hugging Face's datasets wrote: images and labels, or text",
        splits=True,
        opens="trainer.data.formats.arrow:images_split",
    ),
    "own": Format((), "data of a custom task", "nowhere", workers=False),
}


def formats_of(task: str) -> tuple[str, ...]:
    """Returns the names of the formats that a task reads, its default first."""
    return tuple(name for name, one in FORMATS.items() if task in one.tasks)


def described_formats() -> str:
    """Lists all formats in one sentence, for the configuration page."""
    places = {"nowhere": "without data.path", "path": "at data.path", "path or URL": "at data.path or a URL"}
    groups = {
        words: ", ".join(f"{name} ({one.about})" for name, one in FORMATS.items() if one.place == place)
        for place, words in places.items()
    }
    return "; ".join(f"{words}: {names}" for words, names in groups.items())
