"""Promise: what `save_to_disk` of Hugging Face's datasets wrote is trained on, images and text."""

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers import forked
from tests.helpers.toys import make_recipe
from trainer.config.data import DataConfig
from trainer.config.recipe import Recipe
from trainer.data.dataset import Dataset
from trainer.data.formats.arrow import ArrowImages
from trainer.data.sources import load_images
from trainer.errors import BadInputError
from trainer.tasks.classification import Classification
from trainer.tasks.language import Language
from trainer.train.components.task import check_files, make_task

pyarrow = pytest.importorskip("pyarrow")

NAMES = ["cat", "dog"]


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (10, 8), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write(
    folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, files: int = 2
) -> Path:
    """A split as `Dataset.save_to_disk` leaves it: Arrow streams, and what they are as JSON."""
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    per_file = -(-table.num_rows // files)
    for number, name in enumerate(names):
        part = table.slice(number * per_file, per_file)
        with (
            pyarrow.OSFile(str(folder / name), "wb") as sink,
            pyarrow.ipc.new_stream(sink, part.schema) as to,
        ):
            to.write_table(part, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    splits = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    (folder.parent / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    return folder


FEATURES = {"label": {"names": NAMES, "_type": "ClassLabel"}, "image": {"_type": "Image"}}


def pictures(count: int) -> dict[str, Any]:
    images = [{"bytes": png(10 * number), "path": None} for number in range(count)]
    return {"image": images, "label": [number % 2 for number in range(count)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "set" / "train", pictures(16), FEATURES)
    write(tmp_path / "set" / "test", pictures(5), FEATURES, files=1)
    return tmp_path / "set"


def recipe_of(path: Path, task: str = "classification", **data: Any) -> Recipe:
    sizes = {"global_batch_size": 4, "micro_batch_size": 4, "image_size": 8, "name": "hf", "path": path}
    return make_recipe(task=task, data={**sizes, **data}, epochs=2)


def read(dataset: Dataset, samples: list[int]) -> dict[str, Any]:
    out = {n: np.zeros((len(samples), *f.shape), f.dtype) for n, f in dataset.fields.items()}
    dataset.read(np.array(samples), None, out)
    return out


def test_images_and_labels_are_those_of_the_rows(folder: Path) -> None:
    recipe = recipe_of(folder)
    task = make_task(recipe)
    assert isinstance(task, Classification)
    check_files(recipe, task)
    assert tuple(task.describe()["classes"]) == ("cat", "dog")
    assert (len(task.train_data), len(task.evaluation_data)) == (16, 5)
    got = read(task.evaluation_data, [4, 0, 3])
    assert got["label"].tolist() == [0, 0, 1]
    assert [int(image[..., 0].mean()) for image in got["image"]] == [40, 0, 30]
    assert task.train_data.fingerprint() == make_task(recipe).train_data.fingerprint()
    assert task.train_data.fingerprint() != task.evaluation_data.fingerprint()


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ((), ()),
        (("state.bak", "x.txt"), ()),
        (("data-00000-of-00003.arrow", "data-00001-of-00003.arrow"), (2, "data-00000-of-00003.arrow")),
        (("cache-0f.arrow",), (1, "cache-0f.arrow")),
    ],
)
def test_files_that_the_state_does_not_name_are_counted(folder: Path, beside: Any, told: Any) -> None:
    for name in beside:
        (folder / "train" / name).write_bytes(b"of an earlier save")
    data: Any = load_images(DataConfig(name="hf", path=folder), 0).train
    assert tuple((one.count, one.first) for one in data.left_out) == ((told,) if told else ())
    assert all(one.reason == "Arrow file{s} that state.json doesn't name" for one in data.left_out)


@pytest.mark.parametrize(
    ("paths", "twice", "both"), [("{}", 0, 0), ("a/{}", 0, 5), ("a/0", 2, 5), (None, 0, 0)]
)
def test_images_of_one_path_are_counted(paths: str | None, twice: int, both: int, tmp_path: Path) -> None:
    for part, count in (("train", 16), ("test", 5)):
        made = pictures(count)
        for number, image in enumerate(made["image"]):
            image["path"] = paths and paths.format(number)
        write(tmp_path / part, made, FEATURES, files=1)
    notes = load_images(DataConfig(name="hf", path=tmp_path), 0).notes
    found = [note for note in notes if str(tmp_path) in note]
    assert len(found) == twice + bool(both) and (not both or f"{both} of 5" in found[-1])


def test_labels_without_names_are_words_or_numbers(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("validation", 4)):
        images = [png(number) for number in range(count)]  # plain bytes
        write(tmp_path / part, {"picture": images, "kind": [("b", "a")[n % 2] for n in range(count)]})
    task = make_task(recipe_of(tmp_path, input_column="picture", label_column="kind"))
    assert tuple(task.describe()["classes"]) == ("a", "b")
    assert read(task.evaluation_data, [0, 1])["label"].tolist() == [1, 0]


def test_it_trains_with_workers_and_goes_on(folder: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "epochs": 2,
        "data": {**recipe_of(folder).data.model_dump(), "workers": 1},
        "model": {"width": 4},
    }
    recipe = forked.small(**sections)
    whole = forked.attempt(tmp_path / "whole", recipe)
    assert whole.code == 0, whole.said
    assert forked.attempt(tmp_path / "cut", recipe, stop_after=3).code == 75
    assert forked.attempt(tmp_path / "cut", recipe).code == 0
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert ends[0] == ends[1]


def test_a_worker_that_is_not_forked_opens_the_files_itself(folder: Path) -> None:
    records = ArrowImages(folder / "train", "image", "label")
    sent = pickle.loads(pickle.dumps(records._table))  # labels go as a descriptor, by multiprocessing alone
    records._table = sent
    assert records.read(3) == png(30)


def test_only_zeros_behind_the_end_are_nothing_and_other_columns_are_not_read(tmp_path: Path) -> None:
    notes = ["n" * 0x1234] * 16
    path = write(tmp_path / "set" / "train", {**pictures(16), "note": notes}, FEATURES)
    ends_with(lambda data: data + bytes(1 << 17))(path.parent)
    for file in path.glob("*.arrow"):
        file.write_bytes(file.read_bytes().replace(struct.pack("<i", 0x1234), struct.pack("<i", -1)))
        with pytest.raises(pyarrow.ArrowInvalid):
            pyarrow.ipc.open_stream(file.read_bytes()).read_all().validate(full=True)
    records = ArrowImages(path, "image", "label")
    assert [records.read(row) for row in (0, 15)] == [png(0), png(150)]


def test_rows_of_text_are_documents(tmp_path: Path) -> None:
    write(tmp_path / "train", {"story": ["one two", "", "three"]})
    write(tmp_path / "val", {"story": ["föur"]})
    values = recipe_of(tmp_path, "language", input_column="story").model_dump()
    values["language"] = {"sequence_length": 4}
    task = make_task(Recipe.model_validate(values))
    assert isinstance(task, Language)
    assert task.describe()["tokenizer"] == "bytes"
    assert task._about.tokens.tobytes() == b"one two\0three\0"
    values["language"] = {"text": "padded", "sequence_length": 8}
    assert len(make_task(Recipe.model_validate(values)).train_data) == 2


def test_what_datasets_itself_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    made = datasets.Dataset.from_dict(pictures(10), features=features)
    made.train_test_split(0.3, seed=0).save_to_disk(str(tmp_path / "set"))
    task = make_task(recipe_of(tmp_path / "set"))
    assert (len(task.train_data), len(task.evaluation_data)) == (7, 3)
    read(task.train_data, [0, 6])


def break_off(path: Path) -> None:
    for file in path.glob("train/*.arrow"):
        file.write_bytes(file.read_bytes()[:100])


LAST = "train/data-00001-of-00002.arrow"


def ends_with(change: Any) -> Any:
    """Changes the bytes of the last file."""
    return lambda path: (path / LAST).write_bytes(change((path / LAST).read_bytes()))


def another_type(path: Path) -> None:
    table = pyarrow.ipc.open_stream((path / LAST).read_bytes()).read_all()
    label = table.schema.get_field_index("label")
    table = table.set_column(label, "label", table["label"].cast("int32"))
    with pyarrow.ipc.new_stream(str(path / LAST), table.schema) as to:
        to.write_table(table)


def state(text: str) -> Any:
    return lambda path: (path / "train/state.json").write_text(text)


def json_file(name: str, content: Any) -> Any:
    return lambda path: (path / name).write_text(json.dumps(content))


ODD_SPLITS: tuple[object, ...] = (5, [{}], "train")
ODD_FEATURES = ([1], "label", 3, {"label": {"names": "cat"}}, {"label": {"names": 2}})
ONE_OF_TWO = json.dumps({"_data_files": [{"filename": LAST.removeprefix("train/")}]})

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    # A reader takes the end of the file for the end of the stream.
    (ends_with(lambda data: data[:-8]), {}, "00001-of-00002.arrow: is cut off at byte "),
    (ends_with(lambda data: data * 2), {}, "bytes lie behind its end at byte "),
    (ends_with(lambda data: data + bytes(1 << 17) + b"x"), {}, "131,073 bytes lie behind its end"),
    (
        ends_with(lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
        {},
        "can't be read (a Git LFS pointer",
    ),
    (ends_with(lambda _: b"<html><body>404</body></html>"), {}, "can't be read (an HTML page)"),
    (another_type, {}, "column 'label' holds int32, and in data-00000-of-00002.arrow int64"),
    (state(ONE_OF_TWO), {}, "names 1 files, and data-00001-of-00002.arrow is one of 2"),
    (
        state(ONE_OF_TWO.replace("}]", '}], "_indices_files": [{}]')),
        {},
        "chooses rows by a table of their numbers",
    ),
    (state('{"_data_files": [3]}'), {}, "isn't what save_to_disk writes"),
    (state(r'{"_data_files": [{"filename": "\ud800"}]}'), {}, r"'\ud800' isn't the name of a file beside it"),
    (state("version https://git-lfs.github.com/spec/v1\n"), {}, "isn't JSON (a Git LFS pointer"),
    (
        None,
        {"input_column": "pixels"},
        "no column 'pixels' (there are: 'image', 'label'); name it by data.input_column",
    ),
    (
        None,
        {"label_column": "kind"},
        "no column 'kind' (there are: 'image', 'label'); name it by data.label_column",
    ),
    (None, {"input_column": "label"}, "column 'label' holds int64, no encoded images"),
    (None, {"label_column": "image"}, "row 0 of column 'image': label {'bytes': b'"),
    (None, {"eval_split": "dev"}, "no split 'dev' (there are: test, train); name what to measure on"),
    (lambda path: (path / "dataset_dict.json").unlink(), {}, "dataset_dict.json: can't be read"),
    (lambda path: (path / "train/state.json").write_text("{"), {}, "state.json: isn't JSON"),
    (lambda path: (path / "train/state.json").write_text("{}"), {}, "state.json: names no files"),
    (break_off, {}, "-of-00002.arrow: can't be read ("),
    (lambda path: next(path.glob("train/*1-of*")).unlink(), {}, "data-00001-of-00002.arrow: can't be read ("),
    (
        lambda path: (path / "train/dataset_info.json").write_text(
            json.dumps({"features": {"label": {"names": ["cat"]}}})
        ),
        {},
        "train: row 1 has no label (column 'label' is 1)",
    ),
    *((json_file("dataset_dict.json", {"splits": odd}), {}, "'splits' isn't a list") for odd in ODD_SPLITS),
    *(
        (json_file("train/dataset_info.json", {"features": odd}), {}, "features aren't what")
        for odd in ODD_FEATURES
    ),
]


@pytest.mark.parametrize(("breaks", "data", "message"), WRONG)
def test_what_is_wrong_is_said(folder: Path, breaks: Any, data: dict[str, Any], message: str) -> None:
    if breaks is not None:
        breaks(folder)
    with pytest.raises(BadInputError) as error:
        make_task(recipe_of(folder, **data))
    assert message in str(error.value)


def test_one_set_without_splits_and_keys_of_others_are_refused(folder: Path) -> None:
    with pytest.raises(BadInputError, match="holds one set without splits"):
        make_task(recipe_of(folder / "train"))
    with pytest.raises(BadInputError, match=r"holds struct.*, no text"):
        make_task(recipe_of(folder, "language", input_column="image"))
    with pytest.raises(ValueError, match=r"data\.eval_split is for data\.name=hf"):
        recipe_of(folder, name="folder", eval_split="test")
    with pytest.raises(ValueError, match=r"data\.label_column: not read by task=language"):
        recipe_of(folder, "language", label_column="kind")


def test_without_pyarrow_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadInputError, match="needs pyarrow, which isn't installed"):
        make_task(recipe_of(folder))
