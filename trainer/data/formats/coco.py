"""COCO data sets: images with boxes from a JSON file of instances, which is checked before training.

See https://cocodataset.org/#format-data.
"""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from trainer.config.data import OnCorrupt
from trainer.config.section import first_problem
from trainer.data.corrupt import Corrupt
from trainer.data.dataset import spread
from trainer.data.formats.boxes import WRONG_BOX, Picture
from trainer.data.formats.files import IMAGES, Files, ListFile, hint, unlisted
from trainer.data.formats.index import Index, index_of, kept
from trainer.data.formats.labels import folded, quoted
from trainer.data.formats.orientation import SWAPPED, UPRIGHT, orientation
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import LeftOut, one, tally
from trainer.data.shared import name_columns, names_in
from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json
from trainer.host.files import hash_of_rest
from trainer.rng import Ints

_YEARS = ("", "2017", "2014")
_ROBOFLOWS = {"val": ("valid",)}  # Roboflow's names of splits
_HEAD = 4096
_LOOKED_AT, _THREADS = 1000, 16
_LARGEST = 16 << 30  # COCO's own have 0.5 GB, LVIS 1.1, Objects365 6
_LARGE = 10_000  # images of a list that is kept
_EDGE = 1.0  # pixels that a box may extend beyond its image: COCO's are rounded
_FRACTION = 1.001  # width and height of the largest box if all are fractions of the image, with rounding
_IGNORED = "box{es} with ignore=1"

# Keys that are read, and notes of COCO Annotator, Roboflow, trackers and others, which change no box.
_KNOWN = {
    key
    for line in (
        "info licenses images annotations categories type id name file_name width height image_id",
        "category_id bbox iscrowd ignore area segmentation supercategory license date_captured flickr_url",
        "coco_url url path extra keypoints num_keypoints skeleton keypoint_colors caption score color isbbox",
        "isthing metadata creator events milliseconds uuid uid track_id instance_id dataset_id category_ids",
        "num_annotations regenerate_thumbnail annotated annotating video_id frame_id synset synonyms",
        "def frequency image_count instance_count",
    )
    for key in line.split()
}
_KEYS = 5  # unknown keys that are named; further ones are counted together
_CROWD, _IGNORE = 1, 2

# Numbers may be written as floats (3.0), or as text.
_Id = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
_Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class _Image(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    id: _Id
    file_name: _Text
    height: Annotated[_Id, Field(gt=0)]
    width: Annotated[_Id, Field(gt=0)]


class _Annotation(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    id: _Id
    image_id: _Id
    category_id: _Id
    bbox: NotRequired[Any]  # see `_wrong`
    iscrowd: NotRequired[bool]  # pycocotools can't read one without a value
    ignore: NotRequired[bool | None]
    area: NotRequired[Any]


class _Category(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    id: Annotated[_Id, Field(ge=0)]
    name: _Text
    supercategory: NotRequired[Any]


class _Instances(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    images: list[_Image]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], Field(min_length=1)]


class CocoPictures:
    """Images of a folder with their boxes from a file of instances.

    Args:
        root: data.path, with `train/` (or `train2017/`), `val/` and `annotations/instances_train.json`.
        part: "train" or "val".
        on_corrupt: "fail": an invalid box is an error; else it is left out.
        upright: True to apply the EXIF orientation.
        training: True to train on it: images without boxes are left out, and boxes with `ignore: 1` are
            flagged as crowds, which training leaves out. For evaluation they are objects, as `ignore` has no
            effect in pycocotools. None: if `part` is "train".
        indexes: Folder in which the list of many images is kept; None: it isn't.

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
        upright: bool = False,
        training: bool | None = None,
        indexes: Path | None = None,
    ) -> None:
        """Reads the file of instances; `check.check_data` checks that all images exist."""
        from trainer.data.formats import decode

        self._decode = decode.decode_whole
        self._orientation = partial(orientation, formats=decode.formats())
        file, folder = _places(root, part)
        how = (on_corrupt == "fail", part == "train" if training is None else training)
        index = kept(
            indexes, ["coco", file.name, _sha256(file), *how], lambda: _listed(file, folder, *how), _LARGE
        )
        self.categories = {int(number): str(name) for number, name in index.facts["categories"]}
        self.classes: Sequence[str] = tuple(self.categories.values())
        self.boxes: int = index.facts["annotations"]
        self._remarks: str = index.facts["remarks"]
        self.sizes, self._ends, self._rows, self._areas = (
            index.more[name] for name in ("sizes", "ends", "rows", "areas")
        )
        self.most = int(np.diff(self._ends, prepend=0).max())
        reason = f"image{{s}} that {file.name} doesn't name"
        self.left_out = tally((*index.left_out, *unlisted(reason, folder, IMAGES, names_in(index.more))))
        self.records = Files(folder, index._replace(left_out=(), more={}), ListFile(file, "image"))
        self.records.upright = upright

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
        return f"{self.records.fingerprint()} {digest.hexdigest()[:16]}{' upright' * self.records.upright}"

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
        image = self._decode(data, self.records.upright)[0].permute(1, 2, 0).numpy()
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
        if self.records.upright:
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
        of_boxes = self._remarks
        if self.records.upright:
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


def _sha256(file: Path) -> str:
    with reading(file), file.open("rb") as opened:
        return hash_of_rest(opened)


def _listed(file: Path, folder: Path, strict: bool, training: bool) -> Index:
    """Lists the images of a file of instances, and their boxes."""
    instances = _load(file)
    left_out, remarks = list[LeftOut](), list[str]()
    categories = _categories(file, instances, left_out)
    images = _images(file, folder, instances)
    boxes = _boxes(file, instances["annotations"], images, categories, strict, left_out)
    named = [entry["file_name"] for entry in images.values()]
    ignored = Counter(images[n]["file_name"] for n in images for box in boxes[n] if box[5] == _IGNORE)
    if training:
        # As in torchvision's reference, images without boxes aren't trained on.
        bare = {number for number in images if all(box[5] for box in boxes[number])}
        crowds = [images[n]["file_name"] for n in images for box in boxes[n] if box[5] == _CROWD]
        for reason, names in (
            ("image{s} without a box", [images[number]["file_name"] for number in sorted(bare)]),
            ("box{es} around a crowd", crowds),
            (_IGNORED, ignored.elements()),
        ):
            left_out += [one(reason, f"{file.name}: {name}") for name in names]
        images = {number: image for number, image in images.items() if number not in bare}
        _no_empty_class(file, categories, [row for each in boxes.values() for row in each])
    elif ignored:
        remarks.append(
            f"{ignored.total():,} boxes of {file.name} have ignore=1, the first in {min(ignored)}; "
            "evaluation takes them for objects, as pycocotools does, and training leaves such boxes out"
        )
        boxes = {n: [(*box[:5], int(box[5] == _CROWD), box[6]) for box in each] for n, each in boxes.items()}
    left_out += _unread_keys(file, instances)
    if not images:
        raise BadInputError(f"{file}: holds no images{' with boxes' if training else ''}")
    rows = [boxes[number] for number in images]
    again = [len(each) - len({box[:6] for box in each}) for each in rows]
    if any(again):
        first = next(image["file_name"] for image, more in zip(images.values(), again, strict=True) if more)
        remarks.insert(0, f"{sum(again):,} boxes of {file.name} are there twice, the first in {first}")
    numbers = np.array([row for each in rows for row in each], np.float64).reshape(-1, 7)
    index = index_of(
        [os.fsencode(image["file_name"]) for image in images.values()],
        [0] * len(images),
        tuple(categories.values()),
        tally(left_out),
        number=np.array(list(images), np.int64),
    )
    return index._replace(
        facts={
            "categories": list(categories.items()),
            "annotations": len(instances["annotations"]),
            "remarks": "; ".join(remarks),
        },
        more={
            **name_columns([os.fsencode(name) for name in named]),
            "sizes": np.array([(image["height"], image["width"]) for image in images.values()], np.int64),
            "ends": np.cumsum([len(each) for each in rows]),
            "rows": np.ascontiguousarray(numbers[:, :6]),
            "areas": numbers[:, 6].astype(np.float32),
        },
    )


def _load(file: Path) -> _Instances:
    with reading(file):
        data = file.read_bytes()
    try:
        # Outlines ("segmentation") are most of such a file and aren't used.
        parsed = strict_json.parse_quickly(data, _LARGEST, object_pairs_hook=_without_outlines)
    except ValueError as error:
        what = what_it_is(data[:_HEAD]) or ("text in UTF-16 or UTF-32" if b"\0" in data[:_HEAD] else "")
        reason = first_line(error) if not what or what.startswith("text that begins") else what
        raise BadInputError(f"{file}: not readable JSON ({reason})") from error
    try:
        instances = TypeAdapter(_Instances).validate_python(parsed)
    except ValidationError as error:
        raise BadInputError(f"{file}: {first_problem(error)}; not COCO's format of instances") from error
    for name in ("images", "annotations", "categories"):
        if twice := _twice((entry["id"], None) for entry in instances[name]):
            raise BadInputError(f"{file}: id {twice[0]} is there twice in '{name}'")
    return instances


def _twice(keys: Iterable[tuple[Any, Any]]) -> tuple[Any, Any, Any] | None:
    """Returns the first key that occurs again, with both values; None if none does."""
    seen = dict[Any, Any]()
    for key, value in keys:
        if key in seen:
            return key, seen[key], value
        seen[key] = value
    return None


def _without_outlines(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice in one entry")
    entry.pop("segmentation", None)
    return entry


def _is_number(value: Any) -> bool:
    """True for a finite number below 2^62: integers in JSON are unbounded."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 62


def _categories(file: Path, instances: _Instances, left_out: list[LeftOut]) -> dict[int, str]:
    """Returns category names by id, sorted by id."""
    used = {entry["category_id"] for entry in instances["annotations"]}
    parents = [entry.get("supercategory") for entry in instances["categories"]]
    names = dict[int, str]()
    for entry in sorted(instances["categories"], key=lambda entry: entry["id"]):
        # Roboflow's exports have a parent of all categories, which has no boxes.
        if entry["name"] in parents and entry.get("supercategory") == "none" and entry["id"] not in used:
            left_out.append(one("supercategor{y} without a box", f"{file.name}: {entry['name']!r}"))
        else:
            names[entry["id"]] = entry["name"]
    if not names:
        raise BadInputError(f"{file}: has no categories with boxes")
    if twice := _twice((folded(name), number) for number, name in names.items()):
        _, other, number = twice
        raise BadInputError(
            f"{file}: category {number} ({quoted(names[number])}) can hardly be told from category {other} "
            f"({quoted(names[other])}); make them one, or rename one"
        )
    return names


def _images(file: Path, folder: Path, instances: _Instances) -> dict[int, _Image]:
    """Returns the entries of images by id."""
    for entry in instances["images"]:
        path = Path(name := entry["file_name"])
        if path.is_absolute() or ".." in path.parts:
            raise BadInputError(
                f"{file}: image {entry['id']} file_name {quoted(name)} leads out of the folder"
                f"{hint(os.fsencode(folder), os.fsencode(name))}"
            )
    if twice := _twice((os.path.normpath(entry["file_name"]), entry) for entry in instances["images"]):
        _, other, image = twice
        raise BadInputError(
            f"{file}: images {other['id']} and {image['id']} are both {image['file_name']!r}, so each lacks "
            "the other's boxes; make them one"
        )
    return {entry["id"]: entry for entry in instances["images"]}


def _boxes(
    file: Path,
    annotations: Sequence[_Annotation],
    images: Mapping[int, _Image],
    categories: Mapping[int, str],
    strict: bool,
    left_out: list[LeftOut],
) -> dict[int, list[tuple[float, ...]]]:
    """Returns left, top, right, bottom, class, _CROWD, _IGNORE or 0, and area of each box, by image id."""
    class_of = {number: index for index, number in enumerate(categories)}
    boxes: dict[int, list[tuple[float, ...]]] = {number: [] for number in images}
    for entry in annotations:
        number, category = entry["image_id"], entry["category_id"]
        if number not in images or category not in class_of:
            lacks = f"category {category}" if number in images else f"image {number}"
            raise BadInputError(f"{file}: annotation {entry['id']} of image {number}: there is no {lacks}")
        image = images[number]
        height, width = image["height"], image["width"]
        box: Any = entry.get("bbox")
        wrong = _wrong(box, height, width)
        if wrong and strict:
            raise BadInputError(
                f"{file}: annotation {entry['id']} of image {number} ({image['file_name']}): its box "
                f"{wrong}; mend it, or leave such boxes out with data.on_corrupt=skip"
            )
        if wrong:
            left_out.append(
                one(WRONG_BOX, f"{file.name}: annotation {entry['id']} of image {number}: {wrong}")
            )
            continue
        left, top, wide, high = box
        # The annotated area is of the outline.
        area: Any = entry.get("area")
        area = area if _is_number(area) and area >= 0 else wide * high
        flag = _CROWD if entry.get("iscrowd") else _IGNORE if entry.get("ignore") else 0
        corners = (max(0, left), max(0, top), min(left + wide, width), min(top + high, height))
        boxes[number].append((*corners, class_of[category], flag, area))
    # Which unit boxes have, only all of them together show.
    rows = [row for each in boxes.values() for row in each]
    if rows and all(max(row[2] - row[0], row[3] - row[1]) <= _FRACTION for row in rows):
        raise BadInputError(
            f"{file}: no box is wider or higher than a pixel, so boxes look like fractions of the image; "
            "multiply left and width by the image's width, top and height by its height"
        )
    return boxes


def _unread_keys(file: Path, instances: Mapping[str, Any]) -> list[LeftOut]:
    """Counts the values of keys that no reader knows, unless they are 0, false or empty."""
    counts, first = Counter[str](), dict[str, str]()
    kinds = {"image": "images", "annotation": "annotations", "category": "categories"}
    entries = [(kind, entry) for kind, table in kinds.items() for entry in instances[table]]
    for kind, entry in [("top-level", instances), *entries]:
        for key in (key for key in entry.keys() - _KNOWN if entry[key]):
            inner = entry[key] if isinstance(entry[key], dict) else {}
            for name in [f"{key}.{each}" for each in inner if inner[each]] or [key] * (not inner):
                counts[what := f"{kind} key {quoted(name)}"] += 1
                first.setdefault(what, f"{file.name}: {kind} {entry.get('id', '')}".rstrip())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    found = [(f"value{{s}} of the {what}", what, count) for what, count in ordered[:_KEYS]]
    found += [("value{s} of other keys", what, count) for what, count in ordered[_KEYS:]]
    return [LeftOut(reason=reason, count=count, first=first[what]) for reason, what, count in found]


def _wrong(box: Any, height: int, width: int) -> str:
    """Returns what is wrong with a box; "" if nothing is."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return f"{quoted(box)} isn't a list of four finite numbers"
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
