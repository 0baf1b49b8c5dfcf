"""COCO data sets: images with boxes from a JSON file of instances, which is checked before training.

See https://cocodataset.org/#format-data.
"""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.data import OnCorrupt
from trainer.data.corrupt import Corrupt
from trainer.data.dataset import spread
from trainer.data.formats.boxes import WRONG_BOX, Picture
from trainer.data.formats.files import IMAGES, Files, Listed, beside
from trainer.data.formats.labels import folded, quoted
from trainer.data.formats.names import hint
from trainer.data.formats.orientation import SWAPPED, UPRIGHT, orientation
from trainer.data.formats.records import Reading
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import LeftOut, one, tally
from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json
from trainer.rng import Ints

_YEARS = ("", "2017", "2014")
_ROBOFLOWS = {"val": ("valid",)}  # Roboflow's names of splits
_HEAD = 4096
_LOOKED_AT, _THREADS = 1000, 16
_LARGEST = 16 << 30  # COCO's own have 0.5 GB, LVIS 1.1, Objects365 6
_LARGEST_NUMBER = 1 << 62
_EDGE = 1.0  # pixels that a box may extend beyond its image: COCO's are rounded
_FRACTION = 1.001  # width and height of the largest box if all are fractions of the image, with rounding
_IGNORED = "box{es} with ignore=1"

# Keys that are read, and notes: what they say changes nothing about a box.
_KNOWN: Mapping[str, set[str]] = {
    kind: set(keys.split())
    for kind, keys in {
        # Notes of COCO Annotator, pycococreator, trackers and others follow the format's own keys.
        "annotation": "id image_id category_id bbox iscrowd ignore area segmentation keypoints num_keypoints "
        "caption score width height color isbbox metadata creator events milliseconds uuid uid track_id "
        "instance_id date_captured",
        # Roboflow's `extra` is the name before the export; what follows is COCO Annotator's and of videos.
        "image": "id file_name width height license date_captured flickr_url coco_url extra url path "
        "dataset_id category_ids num_annotations metadata milliseconds regenerate_thumbnail annotated "
        "annotating events video_id frame_id",
        "category": "id name supercategory keypoints skeleton keypoint_colors color metadata creator isthing "
        "synset synonyms def frequency image_count instance_count",
        "top-level": "info licenses images annotations categories type",
    }.items()
}
_KEYS = 5  # unknown keys that are named; further ones are counted together
_CROWD, _IGNORE = 1, 2


class CocoPictures:
    """Images of a folder with their boxes from a file of instances.

    Args:
        root: data.path, with `train/` (or `train2017/`), `val/` and `annotations/instances_train.json`.
        part: "train" or "val".
        on_corrupt: "fail": an invalid box is an error; else it is left out.
        reading: Settings for reading pixels.
        training: True to train on it: images without boxes are left out, and boxes with `ignore: 1` are
            flagged as crowds, which training leaves out. For evaluation they are objects, as `ignore` has no
            effect in pycocotools. None: if `part` is "train".

    Raises:
        BadInputError: If a file is missing or invalid, with the id of the image.
    """

    channels = 3
    in_memory = False

    def __init__(
        self,
        root: Path,
        part: str,
        on_corrupt: OnCorrupt,
        reading: Reading = Reading(),  # noqa: B008  (a tuple)
        training: bool | None = None,
    ) -> None:
        """Reads the file of instances; `check.check_data` checks that all images exist."""
        from trainer.data.formats import decode

        self._decode = decode.decode_whole
        self._orientation = partial(orientation, formats=decode.formats())
        file, folder = _places(root, part)
        instances = _load(file)
        left_out = list[LeftOut]()
        self.categories = _categories(file, instances, left_out)
        self.classes: Sequence[str] = tuple(self.categories.values())
        images = _images(file, folder, instances)
        _no_fractions(file, instances["annotations"])
        boxes = _boxes(file, instances, images, self.categories, on_corrupt == "fail", left_out)
        self.boxes = len(instances["annotations"])
        ignored = Counter(name for n, (name, *_) in images.items() for box in boxes[n] if box[5] == _IGNORE)
        self._ignored = ""
        named = [name for name, *_ in images.values()]
        if training is None:
            training = part == "train"
        if training:
            # As in torchvision's reference, images without boxes aren't trained on.
            bare = {number for number in images if all(box[5] for box in boxes[number])}
            left_out += [
                one("image{s} without a box", f"{file.name}: {images[number][0]}") for number in sorted(bare)
            ]
            crowds = [file_of[0] for n, file_of in images.items() for box in boxes[n] if box[5] == _CROWD]
            left_out += [one("box{es} around a crowd", f"{file.name}: {name}") for name in crowds]
            left_out += [one(_IGNORED, f"{file.name}: {name}") for name in ignored.elements()]
            images = {number: image for number, image in images.items() if number not in bare}
            _no_empty_class(file, self.categories, [row for each in boxes.values() for row in each])
        elif ignored:
            self._ignored = (
                f"{ignored.total():,} boxes of {file.name} have ignore=1, the first in {min(ignored)}; "
                "evaluation takes them for objects, as pycocotools does, and training leaves such boxes out"
            )
            boxes = {
                n: [(*box[:5], int(box[5] == _CROWD), box[6]) for box in each] for n, each in boxes.items()
            }
        left_out += _unread_keys(file, instances)
        left_out += beside(f"image{{s}} that {file.name} doesn't name", folder, named, IMAGES, deep=True)
        self.left_out = tally(left_out)
        if not images:
            raise BadInputError(f"{file}: holds no images{' with boxes' if training else ''}")
        rows = [boxes[number] for number in images]
        again = [len(each) - len({box[:6] for box in each}) for each in rows]
        first = next((name for (name, *_), more in zip(images.values(), again, strict=True) if more), "")
        self._twice = f"{sum(again):,} boxes of {file.name} are there twice, the first in {first}" * bool(
            first
        )
        self.sizes = np.array([image[1:] for image in images.values()], np.int64)
        self._ends = np.cumsum([len(each) for each in rows])
        numbers = np.array([row for each in rows for row in each], np.float64).reshape(-1, 7)
        self._rows, self._areas = np.ascontiguousarray(numbers[:, :6]), numbers[:, 6].astype(np.float32)
        self.most = max(len(each) for each in rows)
        names = [os.fsencode(image[0]) for image in images.values()]
        self.records = Files(
            folder, names, [0] * len(images), self.classes, Listed(file, "image", list(images))
        )
        self.records.reading = reading

    def __len__(self) -> int:
        return len(self.records)

    def only(self, samples: Ints) -> "CocoPictures":
        """Returns the subset of some images, renumbered in this order."""
        part = copy.copy(self)
        part.records, part.sizes = self.records.only(samples), self.sizes[samples]
        counts = np.diff(self._ends, prepend=0)[samples]
        part._ends = np.cumsum(counts)
        # Index of each box: the start of its image's boxes, and the position among them.
        rows = np.repeat(self._ends[samples] - part._ends, counts) + np.arange(counts.sum())
        part._rows, part._areas = self._rows[rows], self._areas[rows]
        return part

    def numbered_by(self, classes: Sequence[str]) -> "CocoPictures":
        """Returns the same images with the class numbers of other data; their own classes are among them."""
        if tuple(self.classes) == tuple(classes):
            return self
        part, number = copy.copy(self), {name: index for index, name in enumerate(classes)}
        numbers = np.array([number[name] for name in self.classes])
        part.classes, part._rows = classes, self._rows.copy()
        part._rows[:, 4] = numbers[self._rows[:, 4].astype(np.int64)]
        return part

    def fingerprint(self) -> str:
        """Returns a hash of the boxes and categories, and the fingerprint of the files."""
        digest = hashlib.sha256(repr(self.categories).encode())
        for array in (self._rows, self._ends, self.sizes):
            digest.update(array.tobytes())
        return f"{self.records.fingerprint()} {digest.hexdigest()[:16]}{self.records.reading}"

    def name(self, sample: int) -> str:
        """Returns the path of an image."""
        return self.records.name(sample)

    @property
    def ids(self) -> list[int]:
        """Id of each image in the file of instances."""
        return self.records.numbers

    def read(self, sample: int) -> Picture:
        """Decodes an image.

        Raises:
            Corrupt: If it can't be decoded, or its size differs from the annotations'.
        """
        data = self.records.read(sample)
        image = self._decode(data, self.records.reading)[0].permute(1, 2, 0).numpy()
        height, width = self.sizes[sample].tolist()
        if image.shape[:2] != (height, width):
            raise Corrupt(
                f"has {image.shape[1]} x {image.shape[0]} pixels, and its annotations say {width} x {height}"
                + self._because_of_exif(data)
            )
        begin = int(self._ends[sample - 1]) if sample else 0
        here = slice(begin, int(self._ends[sample]))
        boxes, label, crowd = np.split(self._rows[here], [4, 5], axis=1)
        return Picture(
            image,
            boxes.astype(np.float32),
            label[:, 0].astype(np.int64),
            crowd[:, 0] > 0,
            self._areas[here],
        )

    def _because_of_exif(self, data: bytearray) -> str:
        """Returns a hint if the EXIF orientation may explain a difference in size."""
        if (turn := self._orientation(data)) < SWAPPED:
            return ""
        if self.records.reading.upright:
            return (
                f", before its EXIF orientation ({turn}) was applied; data.exif_orientation=ignore leaves it"
            )
        return f"; its EXIF orientation is {turn}: data.exif_orientation=apply turns it"

    def remarks(self, everything: bool) -> str:
        """Returns a line on boxes that are there twice or measured in spite of `ignore`, and on EXIF, or "".

        Their size doesn't show whether boxes were drawn on the stored or the upright image if it is square,
        mirrored or upside down.

        Args:
            everything: True to read every image, not 1000 of them.
        """
        of_boxes = "; ".join(filter(None, (self._twice, self._ignored)))
        if self.records.reading.upright:
            return of_boxes
        chosen = spread(len(self), len(self) if everything else _LOOKED_AT).tolist()

        def is_turned(sample: int) -> bool:
            try:
                return self._orientation(self.records.read(sample)) != UPRIGHT
            except BadInputError:  # training on it raises the same error
                return False

        with ThreadPoolExecutor(_THREADS) as pool:
            turned = [sample for sample, odd in zip(chosen, pool.map(is_turned, chosen), strict=True) if odd]
        if not turned:
            return of_boxes
        looked = "" if len(chosen) == len(self) else f" that were looked at of {len(self):,}"
        return f"{of_boxes}; " * bool(of_boxes) + (
            f"{len(turned):,} of {len(chosen):,} images{looked} are to be turned or mirrored by their EXIF "
            f"orientation, the first: {self.name(turned[0])}; they are taken as they are stored, and so must "
            "their boxes be: if they were drawn on upright images, set data.exif_orientation=apply"
        )


def _places(root: Path, part: str) -> tuple[Path, Path]:
    for year in _YEARS:
        file = root / "annotations" / f"instances_{part}{year}.json"
        if file.is_file():
            folder = root / f"{part}{year}"
            inner = root / "images" / folder.name  # as CVAT writes it
            if not folder.is_dir() and not inner.is_dir():
                raise BadInputError(f"{folder}: no such folder, and {file} describes its images")
            return file, folder if folder.is_dir() else inner
    for folder in (root / name for name in (part, *_ROBOFLOWS.get(part, ()))):
        if (file := folder / "_annotations.coco.json").is_file():
            return file, folder
    raise BadInputError(
        f"{root}: no annotations/instances_{part}.json or instances_{part}2017.json; data.name=coco needs "
        "these, and the images in train/ and val/ (or train2017/ and val2017/), or Roboflow's train/ and "
        "valid/ with _annotations.coco.json in each"
        f"{hint(os.fsencode(root), f'annotations/instances_{part}.json'.encode())}"
    )


def _load(file: Path) -> Mapping[str, Any]:
    with reading(file):
        data = file.read_bytes()
    try:
        # Outlines ("segmentation") are most of such a file and aren't used.
        instances = strict_json.parse_quickly(data, _LARGEST, object_pairs_hook=_without_outlines)
    except (ValueError, RecursionError) as error:
        what = what_it_is(data[:_HEAD]) or ("text in UTF-16 or UTF-32" if b"\0" in data[:_HEAD] else "")
        reason = first_line(error) if not what or what.startswith("text that begins") else what
        raise BadInputError(f"{file}: not readable JSON ({reason})") from error
    for name in ("images", "annotations", "categories"):
        if not isinstance(instances, dict) or not isinstance(instances.get(name), list):
            raise BadInputError(f"{file}: no list '{name}': not COCO's format of instances")
        for index, entry in enumerate(instances[name]):
            if not isinstance(entry, dict) or (number := _as_id(entry.get("id"))) is None:
                value = f" ({quoted(entry['id'])})" if isinstance(entry, dict) and "id" in entry else ""
                raise BadInputError(
                    f"{file}: entry {index} of '{name}' has no id that is a whole number{value}"
                )
            entry["id"] = number
        [(most, times)] = Counter(entry["id"] for entry in instances[name]).most_common(1) or [(0, 0)]
        if times > 1:
            raise BadInputError(f"{file}: id {most} is there twice in '{name}'")
    return instances  # type: ignore[no-any-return]


def _without_outlines(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice in one entry")
    entry.pop("segmentation", None)
    return entry


def _as_id(value: Any) -> int | None:
    """Returns an id, which may be written as a float (3.0 is 3); None if it isn't a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and _is_number(value) else None


def _is_number(value: Any) -> bool:
    """True for a finite number below 2^62: integers in JSON are unbounded."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.encode(errors="ignore").decode() == value


def _categories(file: Path, instances: Mapping[str, Any], left_out: list[LeftOut]) -> dict[int, str]:
    """Returns category names by id, sorted by id."""
    for entry in instances["categories"]:
        if not _is_name(entry.get("name")):
            raise BadInputError(f"{file}: category {entry['id']} has no name")
    if not instances["categories"]:
        raise BadInputError(f"{file}: has no categories")
    used = {_as_id(entry.get("category_id")) for entry in instances["annotations"]}
    parents = {
        name for entry in instances["categories"] if isinstance(name := entry.get("supercategory"), str)
    }
    names = dict[int, str]()
    for entry in sorted(instances["categories"], key=lambda entry: entry["id"]):
        # Roboflow's exports have a parent of all categories, which has no boxes.
        if entry["name"] in parents and entry.get("supercategory") == "none" and entry["id"] not in used:
            left_out.append(one("supercategor{y} without a box", f"{file.name}: {entry['name']!r}"))
        else:
            names[entry["id"]] = entry["name"]
    if not names:
        raise BadInputError(f"{file}: has no categories with boxes")
    if (first := min(names)) < 0:
        raise BadInputError(
            f"{file}: category {first} ('{names[first]}') has an id below 0, as if there were none"
        )
    by_sight = dict[str, int]()
    for number, name in names.items():
        if (other := by_sight.setdefault(folded(name), number)) != number:
            raise BadInputError(
                f"{file}: category {number} ({quoted(name)}) can hardly be told from category {other} "
                f"({quoted(names[other])}); make them one, or rename one"
            )
    return names


def _images(file: Path, folder: Path, instances: Mapping[str, Any]) -> dict[int, tuple[str, int, int]]:
    """Returns file name, height and width by image id."""
    images, by_name = {}, dict[str, int]()
    for entry in instances["images"]:
        number, name = entry["id"], entry.get("file_name")
        height, width = (_as_id(entry.get(side)) for side in ("height", "width"))
        if not _is_name(name) or "\0" in name:
            raise BadInputError(f"{file}: image {number} has no file_name")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            more = hint(os.fsencode(folder), os.fsencode(name))
            raise BadInputError(f"{file}: image {number}: file_name {name!r} leads out of {folder}{more}")
        if not height or not width or height < 0 or width < 0:
            raise BadInputError(f"{file}: image {number} ({name!r}) has no height and width")
        if (other := by_name.setdefault(os.path.normpath(name), number)) != number:
            raise BadInputError(
                f"{file}: images {other} and {number} are both {name!r}, so each lacks the other's boxes; "
                "make them one"
            )
        images[number] = (name, height, width)
    return images


def _boxes(
    file: Path,
    instances: Mapping[str, Any],
    images: Mapping[int, tuple[str, int, int]],
    categories: Mapping[int, str],
    strict: bool,
    left_out: list[LeftOut],
) -> dict[int, list[tuple[float, ...]]]:
    """Returns left, top, right, bottom, class, _CROWD, _IGNORE or 0, and area of each box, by image id."""
    class_of = {number: index for index, number in enumerate(categories)}
    boxes: dict[int, list[tuple[float, ...]]] = {number: [] for number in images}
    for entry in instances["annotations"]:
        number, where = _as_id(entry.get("image_id")), f"{file}: annotation {entry['id']}"
        if number is None or number not in images:
            raise BadInputError(f"{where}: there is no image {quoted(entry.get('image_id'))}")
        category = _as_id(entry.get("category_id"))
        if category is None or category not in class_of:
            raise BadInputError(
                f"{where} of image {number}: there is no category {quoted(entry.get('category_id'))}"
            )
        # Without a value `ignore` says nothing; pycocotools can't read an `iscrowd` without one.
        crowd, ignore = entry.get("iscrowd", 0), entry.get("ignore") or 0
        for key, flag in (("iscrowd", crowd), ("ignore", ignore)):
            if flag not in (0, 1):
                raise BadInputError(f"{where} of image {number}: {key} is {quoted(flag)}, neither 0 nor 1")
        name, height, width = images[number]
        wrong = _wrong(entry.get("bbox"), height, width)
        if wrong and strict:
            raise BadInputError(
                f"{where} of image {number} ({name}): its box {wrong}; mend it, or leave such boxes out with "
                "data.on_corrupt=skip"
            )
        if wrong:
            left_out.append(
                one(WRONG_BOX, f"{file.name}: annotation {entry['id']} of image {number}: {wrong}")
            )
        else:
            left, top, wide, high = entry["bbox"]
            right, bottom = min(left + wide, width), min(top + high, height)
            box = (max(0, left), max(0, top), right, bottom)
            # The annotated area is of the outline.
            area = entry.get("area")
            area = area if _is_number(area) and area >= 0 else wide * high
            flag = _CROWD if crowd else _IGNORE if ignore else 0
            boxes[number].append((*box, class_of[category], flag, area))
    return boxes


def _no_fractions(file: Path, annotations: Sequence[Mapping[str, Any]]) -> None:
    """Checks that a box is larger than a pixel; which unit boxes have, only all of them together show.

    Raises:
        BadInputError: If no box is wider or higher than a pixel.
    """
    boxes = [
        box
        for entry in annotations
        if isinstance(box := entry.get("bbox"), list) and len(box) == 4 and all(map(_is_number, box))
    ]
    if boxes and all(max(wide, high) <= _FRACTION for _, _, wide, high in boxes):
        raise BadInputError(
            f"{file}: no box is wider or higher than a pixel, so boxes look like fractions of the image; "
            "multiply left and width by the image's width, top and height by its height"
        )


def _unread_keys(file: Path, instances: Mapping[str, Any]) -> list[LeftOut]:
    """Counts the values of keys that no reader knows, unless they are 0, false or empty."""
    tables = {"annotation": "annotations", "image": "images", "category": "categories"}
    counts, first = Counter[str](), dict[str, str]()
    for kind, known in _KNOWN.items():
        for entry in instances[tables[kind]] if kind in tables else [instances]:
            for key in entry.keys() - known:
                for name in _names(key, entry[key]):
                    counts[what := f"{kind} key {quoted(name)}"] += 1
                    if what not in first:
                        first[what] = f"{file.name}: {kind} {entry['id']}" if kind in tables else file.name
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    entries = [(f"value{{s}} of the {what}", what, count) for what, count in ordered[:_KEYS]]
    entries += [("value{s} of other keys", what, count) for what, count in ordered[_KEYS:]]
    return [LeftOut(reason=reason, count=count, first=first[what]) for reason, what, count in entries]


def _names(key: str, value: Any) -> list[str]:
    """Returns the name of a key, or "key.inner" for each of an object's, if the value isn't 0 or empty."""
    if isinstance(value, dict):
        return [f"{key}.{inner}" for inner, each in value.items() if each]
    return [key] if value else []


def _wrong(box: Any, height: int, width: int) -> str:
    """Returns what is wrong with a box; "" if nothing is."""
    if not isinstance(box, list) or len(box) != 4 or any(isinstance(v, bool) for v in box):
        return "isn't a list of four numbers"
    if not all(map(_is_number, box)):
        return f"{box} isn't four finite numbers"
    left, top, wide, high = box
    if wide <= 0 or high <= 0:
        return f"{box} has no area"
    if left < -_EDGE or top < -_EDGE or left + wide > width + _EDGE or top + high > height + _EDGE:
        return f"{box} (left, top, width, height) sticks out of {width} x {height} pixels"
    if np.float32(max(0, left)) >= np.float32(min(left + wide, width)) or np.float32(
        max(0, top)
    ) >= np.float32(min(top + high, height)):
        return f"{box} lies beside its image, or is too small to be told from a point"
    return ""


def _no_empty_class(file: Path, categories: Mapping[int, str], rows: Sequence[tuple[float, ...]]) -> None:
    labeled, of_crowds = ({int(row[4]) for row in rows if bool(row[5]) is crowd} for crowd in (False, True))
    for index, (number, name) in enumerate(categories.items()):
        if index not in labeled:
            crowds = " but around crowds (iscrowd=1, as CVAT marks masks)" if index in of_crowds else ""
            raise BadInputError(
                f"{file}: category {number} ('{name}') has no box to learn from{crowds}; add some, or leave "
                "it out"
            )
