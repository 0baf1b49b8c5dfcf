"""Contract of COCO: boxes are those of its JSON; what can't be meant is found before training, or counted."""

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from tests.helpers.batches import arrays_of
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.tasks import DetectionConfig
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.boxes import BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.tasks.detection import Detection

FILE = "instances_train.json"


def told(**changes: Any) -> dict[str, Any]:
    """Three images, one without boxes, three categories, a crowd. `changes`: a value by its path in it."""
    images = [{"id": n, "file_name": f"{n}.png", "height": 20, "width": 30} for n in (7, 5, 9)]
    boxes = [(7, 90, [2, 3, 10, 5]), (7, 3, [0, 0, 30, 20]), (5, 18, [20, 10, 10, 10]), (5, 3, [1, 1, 3, 3])]
    annotations = [
        {"id": number, "image_id": image, "category_id": category, "bbox": box, "iscrowd": int(number == 4)}
        for number, (image, category, box) in enumerate(boxes, 1)
    ]
    categories = [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}, {"id": 18, "name": "dog"}]
    whole = {"images": images, "annotations": annotations, "categories": categories}
    for path, value in changes.items():
        *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
        what: Any = whole
        for step in way:
            what = what[step]
        what[last] = value
    return whole


def written(root: Path, what: Any, part: str = "train", year: str = "") -> Path:
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / f"{part}{year}").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{part}{year}.json").write_text(json.dumps(what))
    for number in (5, 7, 9):
        Image.new("RGB", (30, 20), (number,) * 3).save(root / f"{part}{year}" / f"{number}.png")
    return root


def train_of(root: Path, what: Any = None, on_corrupt: Any = "fail") -> CocoPictures:
    return CocoPictures(root if what is None else written(root, what), "train", on_corrupt)


def task_of(root: Path, **data: Any) -> Detection:
    data = {"name": "coco", "path": root, **data}
    return Detection(DataConfig(**data), ModelConfig(), DetectionConfig(max_boxes=4), 0)


@pytest.mark.parametrize("year", ["", "2017"])
def test_coco_is_read_as_it_says(tmp_path: Path, year: str) -> None:
    for part in ("train", "val"):
        written(tmp_path, told(), part, year)
    train, val = (CocoPictures(tmp_path, part, "fail") for part in ("train", "val"))
    assert (tuple(train.classes), train.most) == (("car", "dog", "brush"), 2)
    assert (len(train), len(val)) == (2, 3), "nothing is learned from an image without boxes"
    first, second, third = map(val.read, range(3))
    assert first.image.shape == (20, 30, 3) and (first.image == 7).all()
    np.testing.assert_array_equal(first.boxes, [[2, 3, 12, 8], [0, 0, 30, 20]])
    assert (first.label.tolist(), first.crowd.tolist()) == ([2, 0], [False, False])
    assert second.crowd.tolist() == [False, True] and third.boxes.shape == (0, 4)
    written(tmp_path, told(**{"annotations.0.bbox.0": 3}), "train", year)
    assert CocoPictures(tmp_path, "train", "fail").fingerprint() != train.fingerprint()


def test_val_is_numbered_by_the_names_of_train(tmp_path: Path) -> None:
    written(tmp_path, told())
    what = told(categories=[{"id": 1, "name": "dog"}, {"id": 90, "name": "brush"}])
    what["annotations"] = [what["annotations"][0], {**what["annotations"][2], "category_id": 1}]
    written(tmp_path, what, "val")
    task = task_of(tmp_path)
    val = cast(BoxedImages, task.evaluation_data).pictures
    assert task.classes == tuple(val.classes) == ("car", "dog", "brush")
    assert [val.read(number).label.tolist() for number in range(2)] == [[2], [1]]
    what["categories"][0]["name"] = "cat"
    written(tmp_path, what, "val")
    with refused("cat", tmp_path):
        task_of(tmp_path)


def test_images_of_both_parts_are_counted(tmp_path: Path) -> None:
    written(written(tmp_path, told()), told(), "val")
    assert task_of(tmp_path).notes == ()
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").symlink_to("train")
    (note,) = task_of(tmp_path).notes
    assert named(note, "2 of 3", "7.png")


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("annotations.0.bbox", [25, 3, 10, 5], "annotation 1 image 7 7.png 30 20"),
        ("annotations.0.bbox", [2, 3, 10**400, 5], "image 7"),
        ("annotations.2.bbox", [2, 3, 0, 5], "image 5 area data.on_corrupt=skip"),
        ("annotations.2.bbox", [2, 3, 4], "image 5 list"),
        ("annotations.2.bbox", [2, 3, 4, float("nan")], "image 5 nan"),
        ("annotations.0.category_id", [1], "annotations.0.category_id"),
        ("annotations.1.category_id", 4, "annotation 2 image 7 category 4"),
        ("annotations.1.category_id", 18, "category 3 'car'"),
        ("annotations.1.iscrowd", 2, "annotations.1.iscrowd"),
        ("annotations.1.id", 1, "id 1 'annotations'"),
        ("images.1.id", 7, "id 7 'images'"),
        ("images.0", 3, "images.0"),
        ("images.0.file_name", "\ud800.png", "images.0.file_name"),
        ("images.0.file_name", "/data/upload/7.png", "image 7 file_name '/data/upload/7.png' '7.png'"),
        ("images.1.file_name", "./7.png", "7 5 './7.png'"),
        ("categories.0.name", None, "categories.0.name"),
        ("categories.0.name", "car ", "category 90 3 'car'"),
        ("categories.1.id", -1, "categories.1.id"),
        ("categories.1.id", 90.0, "id 90 'categories'"),
        ("annotations", 1, "annotations"),
    ],
)
def test_what_is_wrong_is_found_before_training(tmp_path: Path, path: str, value: Any, names: str) -> None:
    with refused(tmp_path / "annotations" / FILE, names):
        train_of(tmp_path, told(**{path: value}))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (gzip.compress, "gzip"),
        (lambda _: b"<!DOCTYPE html><html>404", "HTML"),
        (lambda data: data.decode().encode("utf-16"), "UTF-16"),
        (lambda _: b"", "empty"),
        (lambda data: data[:-9], "line 1"),
        (lambda data: data[:-1] + b', "annotations": []}', "'annotations'"),
    ],
)
def test_annotations_that_are_no_json(tmp_path: Path, make: Callable[[bytes], bytes], names: str) -> None:
    file = written(tmp_path, told()) / "annotations" / FILE
    file.write_bytes(make(file.read_bytes()))
    with refused(file, names, "JSON"):
        train_of(tmp_path)


def test_annotations_that_are_not_there(tmp_path: Path) -> None:
    file = written(tmp_path, told()) / "annotations" / FILE
    file.unlink()
    for there in (file, file.with_name("instances_Train.json")):
        with refused(f"annotations/{there.name}"):
            train_of(tmp_path)
        file.with_name("instances_Train.json").touch()


def counted(found: CocoPictures) -> dict[str, int]:
    return {each.reason: each.count for each in found.left_out}


NOTES = {"segmentation": [[1, 2]], "keypoints": [1], "caption": "a", "score": 1.0, "odd": 0, "at": {"x": 0}}


@pytest.mark.parametrize(
    ("changes", "word", "count"),
    [
        ({"annotations.3.iscrowd": 0, "annotations.3.ignore": 1}, "ignore", 1),
        ({"annotations.0.ignore": 0.0}, "", 0),
        ({"annotations.3.ignore": True}, "", 0),  # a crowd, which is counted once
        ({"annotations.1.difficult": 1}, "'difficult'", 1),
        ({"annotations.1.attributes": {"occluded": True, "b": False}}, "'attributes.occluded'", 1),
        ({"images.0.neg_category_ids": [3]}, "'neg_category_ids'", 1),
        ({"videos": [{"id": 1}]}, "'videos'", 1),
        ({f"annotations.1.{key}": value for key, value in NOTES.items()}, "", 0),
        ({"info": {"year": 1}, "licenses": [{"id": 1}], "images.0.extra": {"name": "x"}}, "", 0),
        ({"annotations.0.area": 10**400, "categories.0.supercategory": ["x"]}, "", 0),
        ({"images.0.file_name": "./7.png"}, "", 0),
    ],
)
def test_unread_keys_are_counted(changes: dict[str, Any], word: str, count: int, tmp_path: Path) -> None:
    plain = counted(train_of(tmp_path / "plain", told()))
    assert sorted(plain.values()) == [1, 1], "the crowd, and the image without a box"
    found = counted(train_of(tmp_path, told(**changes)))
    more = {reason: number for reason, number in found.items() if reason not in plain}
    assert sum(more.values()) == count
    assert all(word in reason for reason in more)


def test_supercategories_and_many_keys(tmp_path: Path) -> None:
    what, root = told(), {"id": 0, "name": "things", "supercategory": "none"}
    what["categories"] = [root, *({**each, "supercategory": "things"} for each in what["categories"])]
    found = train_of(tmp_path, what)  # as Roboflow exports it
    assert found.classes == ("car", "dog", "brush") and sum(counted(found).values()) == 3
    assert any(each.first.endswith("'things'") for each in found.left_out)
    many = train_of(tmp_path, told(**{f"annotations.0.key{n:03}": 1 for n in range(300)})).left_out
    assert len(many) < 12 and sum(each.count for each in many) == 302


def test_boxes_to_ignore_are_not_trained_on(tmp_path: Path) -> None:
    what = told(**{"annotations.3.iscrowd": 0, "annotations.3.ignore": 1})
    assert train_of(tmp_path, what).read(1).crowd.tolist() == [False, True]
    # To pycocotools they are objects like others, so that evaluation counts them, of any split.
    written(tmp_path, what, "val")
    for part in ("train", "val"):
        measured = CocoPictures(tmp_path, part, "fail", training=False)
        assert not measured.left_out and not measured.read(1).crowd.any()
        assert named(measured.remarks(everything=True), "1")
    with refused("category 90 'brush'"):
        train_of(tmp_path, told(**{"annotations.0.iscrowd": 1}))


def test_boxes_that_are_left_out_are_counted(tmp_path: Path) -> None:
    what = told()
    what["annotations"] += [{"id": n, "image_id": 7, "category_id": 3, "bbox": [2, 3, 0, n]} for n in (8, 9)]
    for part in ("train", "val"):
        written(tmp_path, what, part)
    for on_corrupt in ("skip", "quarantine"):
        with refused("2 of 6 1", FILE):
            task_of(tmp_path, on_corrupt=on_corrupt, corrupt_budget=0.1)
        task = task_of(tmp_path, on_corrupt=on_corrupt, corrupt_budget=0.3)
        for data in (task.train_data, task.evaluation_data):
            assert cast(BoxedImages, data).pictures.most == 2, "they aren't read"
            left_out = cast(Any, data).left_out
            assert [each.count for each in left_out if "annotation 8 of image 7" in each.first] == [2]


@pytest.mark.parametrize(
    ("sizes", "fractions"),
    [
        ([(0.5, 0.25)] * 4, True),
        ([(0.5, 0.25), (1, 1), (1.0000001, 0.3), (0.5, 0.25)], True),
        ([(0.5, 0.25), (0.5, 3), (0.5, 0.5), (1, 1)], False),  # small ones beside a larger one are read
    ],
)
@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
def test_boxes_as_fractions_are_refused(sizes: Any, fractions: bool, on_corrupt: Any, tmp_path: Path) -> None:
    changes = {f"annotations.{n}.bbox": [0.2, 0.1, *size] for n, size in enumerate(sizes)}
    with refused(FILE, "fractions") if fractions else nullcontext():
        assert train_of(tmp_path, told(**changes), on_corrupt).most == 2


def test_a_box_that_is_there_twice_is_told_of(tmp_path: Path) -> None:
    what = told()
    assert train_of(tmp_path, what).remarks(everything=True) == ""
    what["annotations"].append({**what["annotations"][0], "id": 9, "area": 1})
    assert named(train_of(tmp_path, what).remarks(everything=True), "1", FILE, "7.png")


def test_images_that_coco_doesnt_name_are_counted(tmp_path: Path) -> None:
    plain = sum(counted(train_of(tmp_path, told())).values())
    put(tmp_path / "train", "z.jpg", "more/z.PNG", ".hidden.jpg", "._x.jpg", ".cache/a.jpg", "notes.txt")
    (tmp_path / "train" / "loop").symlink_to(".")
    (tmp_path / "train" / "linked").symlink_to("more")
    found = train_of(tmp_path)
    assert (sum(counted(found).values()) - plain, found.left_out[-1].first) == (2, "more/z.PNG")


def test_images_that_are_not_there_or_of_another_size(tmp_path: Path) -> None:
    train_of(tmp_path, told(**{"images.0.width": 31}))
    with refused(tmp_path / "train" / "7.png", "30 x 20 31"):
        arrays_of(BoxedImages(train_of(tmp_path), 32, 4, None))
    data = BoxedImages(train_of(tmp_path, told(**{"images.1.file_name": "8.png"})), 32, 4, None)
    (tmp_path / "train" / "7.png").unlink()
    (tmp_path / "train" / "7.png").symlink_to("gone.png")
    with refused("2 of 2 image 7:", tmp_path / "train" / "7.png"):
        check_data("fast", False, [CheckedData("training", data, 0)])


def test_exports_of_annotation_tools(tmp_path: Path) -> None:
    one, other = tmp_path / "roboflow", tmp_path / "cvat"
    (other / "images").mkdir(parents=True)
    for part, name in (("train", "train"), ("val", "valid")):
        file = written(one, told(), part) / "annotations" / f"instances_{part}.json"
        (one / part).rename(one / name)
        file.rename(one / name / "_annotations.coco.json")
        written(other, json.loads(json.dumps(told()), parse_int=float), part)
        (other / part).rename(other / "images" / part)
    (one / "annotations").rmdir()
    for root in (one, other):
        train, val = (CocoPictures(root, part, "fail") for part in ("train", "val"))
        assert (len(train), len(val)) == (2, 3)
        assert (train.read(0).image == 7).all() and train.read(0).label.tolist() == [2, 0]
