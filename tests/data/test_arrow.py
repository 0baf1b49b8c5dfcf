"""Contract of Hugging Face's folders: what `save_to_disk` wrote is trained on, or refused in one line."""

import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.batches import arrays_of
from tests.helpers.refusals import named, refused
from tests.helpers.toys import make_recipe
from trainer.config.data import DataConfig
from trainer.config.recipe import Recipe
from trainer.data.formats.arrow import ArrowImages
from trainer.data.sources import load_images
from trainer.tasks.classification import Classification
from trainer.tasks.language import Language
from trainer.train.components.task import check_files, make_task

pyarrow = pytest.importorskip("pyarrow")

NAMES = ["cat", "dog"]


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (10, 8), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, columns: dict[str, Any], features: Any = None, files: int = 2) -> Path:
    """A split as `Dataset.save_to_disk` leaves it: Arrow streams, and what they are as JSON."""
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    per_file = -(-table.num_rows // files)
    for number, name in enumerate(names):
        part = table.slice(number * per_file, per_file)
        with pyarrow.ipc.new_stream(str(folder / name), part.schema) as to:
            to.write_table(part, max_chunksize=3 if files > 1 else None)
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


def test_images_and_labels_are_those_of_the_rows(folder: Path) -> None:
    recipe = recipe_of(folder)
    task = make_task(recipe)
    assert isinstance(task, Classification)
    check_files(recipe, task)
    train, evaluation = task.train_data, task.evaluation_data
    assert tuple(task.describe()["classes"]) == ("cat", "dog") and (len(train), len(evaluation)) == (16, 5)
    got, _ = arrays_of(evaluation, [4, 0, 3])
    assert got["label"].tolist() == [0, 0, 1]
    assert [int(image[..., 0].mean()) for image in got["image"]] == [40, 0, 30]
    assert train.fingerprint() == make_task(recipe).train_data.fingerprint() != evaluation.fingerprint()


@pytest.mark.parametrize(
    ("beside", "told"),
    [
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


@pytest.mark.parametrize(("path", "twice", "both"), [("{}", 0, 0), ("a/{}", 0, 5), ("a/0", 2, 5), ("", 0, 0)])
def test_images_of_one_path_are_counted(path: str, twice: int, both: int, tmp_path: Path) -> None:
    for part, count in (("train", 16), ("test", 5)):
        made = pictures(count)
        for number, image in enumerate(made["image"]):
            image["path"] = path.format(number) if path else None
        write(tmp_path / part, made, FEATURES, files=1)
    notes = load_images(DataConfig(name="hf", path=tmp_path), 0).notes
    found = [note for note in notes if str(tmp_path) in note]
    assert len(found) == twice + bool(both) and (not both or named(found[-1], f"{both} of 5"))


def test_labels_without_names_are_words_or_numbers(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("validation", 4)):
        images = [png(number) for number in range(count)]  # plain bytes
        write(tmp_path / part, {"picture": images, "kind": [("b", "a")[n % 2] for n in range(count)]})
    task = make_task(recipe_of(tmp_path, input_column="picture", label_column="kind"))
    assert tuple(task.describe()["classes"]) == ("a", "b")
    assert arrays_of(task.evaluation_data, [0, 1])[0]["label"].tolist() == [1, 0]


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
    recipe = recipe_of(tmp_path, "language", input_column="story")
    task, padded = (
        make_task(Recipe.model_validate({**recipe.model_dump(), "language": one}))
        for one in ({"sequence_length": 4}, {"text": "padded", "sequence_length": 8})
    )
    assert isinstance(task, Language) and task.describe()["tokenizer"] == "bytes"
    assert task._about.tokens.tobytes() == b"one two\0three\0"
    assert len(padded.train_data) == 2


LAST = "train/data-00001-of-00002.arrow"


def ends_with(change: Any) -> Any:
    return lambda path: (path / LAST).write_bytes(change((path / LAST).read_bytes()))


def another_type(path: Path) -> None:
    table = pyarrow.ipc.open_stream((path / LAST).read_bytes()).read_all()
    label = table.schema.get_field_index("label")
    table = table.set_column(label, "label", table["label"].cast("int32"))
    with pyarrow.ipc.new_stream(str(path / LAST), table.schema) as to:
        to.write_table(table)


def json_file(name: str, content: Any) -> Any:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda path: (path / name).write_text(text)


def state_of(*names: str, **more: Any) -> Any:
    return json_file("train/state.json", {"_data_files": [{"filename": name} for name in names], **more})


def train_of(columns: dict[str, Any]) -> Any:

    def make(path: Path) -> None:
        shutil.rmtree(path / "train")
        write(path / "train", columns, files=1)

    return make


def lying(columns: dict[str, Any], true: int, said: int) -> Any:
    """Another training set, with another number wherever its file says `true`."""

    def make(path: Path) -> None:
        train_of(columns)(path)
        file = path / "train" / "data-00000-of-00001.arrow"
        data = file.read_bytes()
        assert struct.pack("<i", true) in data
        file.write_bytes(data.replace(struct.pack("<i", true), struct.pack("<i", said)))

    return make


BYTES = 0x2345
ROW, TWO = ({"image": [b"a" * BYTES] * len(label), "label": label} for label in ([0], ["c", "c"]))
ONE = LAST.removeprefix("train/")

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    # A reader takes the end of the file for the end of the stream.
    (ends_with(lambda data: data * 2), {}, f"{LAST}: byte"),
    (ends_with(lambda data: data[:-8]), {}, f"{LAST}: byte"),
    (ends_with(lambda data: data[:100]), {}, LAST),
    (ends_with(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), {}, f"{LAST}: LFS"),
    (ends_with(lambda _: b"<html><body>404</body></html>"), {}, f"{LAST}: HTML"),
    (lambda path: (path / LAST).unlink(), {}, LAST),
    (another_type, {}, "train: 'label'"),
    (state_of(ONE, _indices_files=[{}]), {}, "rows"),
    (state_of("../other.arrow"), {}, "'../other.arrow'"),
    (json_file("train/state.json", {"_data_files": [3]}), {}, "save_to_disk"),
    (json_file("train/state.json", r'{"_data_files": [{"filename": "\ud800"}]}'), {}, r"'\ud800'"),
    (json_file("train/state.json", "{}"), {}, "state.json:"),
    (json_file("train/state.json", "{"), {}, "state.json: JSON"),
    (json_file("dataset_dict.json", {"splits": 5}), {}, "'splits'"),
    (json_file("train/dataset_info.json", {"features": [1]}), {}, "features"),
    (json_file("train/dataset_info.json", {"features": {"label": {"names": ["cat"]}}}), {}, "row 1 'label'"),
    (lambda path: (path / "dataset_dict.json").unlink(), {}, "dataset_dict.json:"),
    (None, {"input_column": "pixels"}, "'pixels' 'image', 'label' data.input_column"),
    (None, {"label_column": "kind"}, "'kind' 'image', 'label' data.label_column"),
    (None, {"input_column": "label"}, "'label' int64"),
    (None, {"label_column": "image"}, "row 0 'image': label"),
    (None, {"eval_split": "dev"}, "'dev' test, train"),
    (train_of({"image": [{"bytes": 10**12}], "label": [0]}), {}, "'image' int64"),
    (train_of({f"{n}{'x' * 99}": [1] for n in range(2000)}), {}, "'image'"),
    *((lying(rows, BYTES, 1 << 30), {}, "arrow") for rows in (ROW, TWO)),
]


@pytest.mark.parametrize(("breaks", "data", "names"), WRONG)
def test_what_is_wrong_is_said(folder: Path, breaks: Any, data: dict[str, Any], names: str) -> None:
    if breaks is not None:
        breaks(folder)
    with refused(names) as raised:
        make_task(recipe_of(folder, **data))
    assert len(str(raised.value)) < 2000


def test_one_set_without_splits_and_others_keys_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(folder / "train", "splits"):
        make_task(recipe_of(folder / "train"))
    with refused("struct"):
        make_task(recipe_of(folder, "language", input_column="image"))
    for keys in ({"name": "folder", "eval_split": "test"}, {"task": "language", "label_column": "kind"}):
        with refused(f"data.{[*keys][1]}", by=ValueError):
            recipe_of(folder, **keys)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with refused("pyarrow"):
        make_task(recipe_of(folder))
