"""Configuration of the data, and of how it reaches the device."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from trainer.config.formats import FORMATS, described_formats
from trainer.config.section import Section
from trainer.config.sizes import parse_size
from trainer.errors import BadInputError

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(FORMATS)]

OnCorrupt = Literal["fail", "skip", "quarantine"]
Check = Literal["fast", "full", "none"]
Exif = Literal["auto", "apply", "ignore"]
EVAL_CROP = 0.875
_Share = Annotated[float, Field(gt=0, le=1)]
_PART = r"(?!\.)[\w.-]+"  # no way out of a folder
_PARTS = rf"{_PART}(?:/{_PART})*"
HUB_SET = re.compile(rf"hub:(?P<repository>{_PART}/{_PART})@(?P<revision>{_PARTS})(?::(?P<below>{_PARTS}))?")
_SCHEMES = ("s3", "https", "http")


Last = Literal["cross", "drop", "weighted"]


class LoaderConfig(Section):
    """Loading of batches. These keys don't change their content."""

    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="loader workers (processes) per rank; auto: 0 if resident, else by 75 % of its CPUs",
    )
    prefetch: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="batches that a loader worker prepares ahead; auto: 4 of small samples, 2 or 3 of "
        "images, 1 "
        "of video",
    )
    resident: bool | Literal["auto"] = Field(
        "auto", description="keep the data set on the device; auto: if it is in memory and below 256 MiB"
    )
    start_method: Literal["auto", "fork", "forkserver", "spawn"] = Field(
        "auto",
        description="how loader workers are started; auto: fork on Linux while the rank has no other thread, "
        "else "
        "forkserver (macOS: spawn)",
    )


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


def _as_path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and not is_url(value) else value


class DataConfig(LoaderConfig):
    """Data to train on, and batch sizes."""

    name: Kind = Field("digits", description=described_formats())
    path: Annotated[Path | str | None, BeforeValidator(_as_path)] = Field(
        None,
        description="path of the data: a folder, for shards and pack s3://BUCKET/PATH or https://HOST/PATH, "
        "for conversations hub:OWNER/NAME@REVISION[:FOLDER]",
    )
    cache: Path | None = Field(None, description="local folder for copies of remote data; jobs may share it")
    cache_limit: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="largest size of the copies of shards and packs, such as 200GB (default: no limit); if "
        "they don't all fit, the order shuffles within a few of them at a time",
    )
    index: Path | None = Field(
        None,
        description="folder in which indexes of local data are kept, and the hash of each sample that is "
        "read whole; default: one in the user's cache, without hashes but those of `trainer data verify` "
        "(folder, table, shards, coco, hf)",
    )
    on_corrupt: OnCorrupt = Field(
        "fail",
        description="a sample that can't be decoded: fail, skip (another, always the same, stands in) or "
        "quarantine (that, and the run folder's quarantine.jsonl names it)",
    )
    corrupt_budget: float = Field(
        0.001,
        ge=0,
        le=1,
        description="fraction of the samples that may be corrupt before the run fails, and of the rows of "
        "conversations that can't be meant",
    )
    check: Check = Field(
        "fast",
        description="before ranks start: fast (all files that a folder, a table or COCO's annotations name, "
        "and all shards of tar sets and packs, are there), full (that, and each sample decodes) or none",
    )
    exif_orientation: Exif = Field(
        "auto",
        description="orientation that a camera wrote into an image's EXIF: apply, ignore, or auto (hf: "
        "apply, as `datasets` does; a pack: as it was made; else ignore, as torchvision does)",
    )
    global_batch_size: int = Field(
        64, ge=1, le=1 << 24, description="samples per optimizer step, over all ranks"
    )
    micro_batch_size: int = Field(
        64,
        ge=1,
        description="samples per forward pass on one rank; part of the arithmetic; auto: the most that "
        "fits on the GPUs",
        json_schema_extra={"words": "int | auto"},
    )
    eval_batch_size: int = Field(256, ge=1, description="samples per forward pass in evaluation, on one rank")
    last_batch: Last = Field(
        "cross",
        description="the last step of an epoch: cross into the next epoch, drop it, or weighted (padded)",
    )
    shuffle: bool = Field(
        True,
        description="false: samples in the order of the data, in every epoch, as carried state needs",
    )
    input_column: str | None = Field(
        None,
        description="column of the images or texts; default: image, or text (hf), or whichever of messages, "
        "prompt, text is there (conversations)",
    )
    label_column: str = Field("label", description="column of the classes (hf)")
    label_separator: str | None = Field(
        None,
        min_length=1,
        max_length=8,
        description="text between the classes of an image that has several, as in cat|dog (table)",
    )
    label_columns: list[str] | None = Field(
        None,
        min_length=1,
        description="columns of 0 and 1, one for each class, of images that have several (table)",
    )
    eval_split: str | None = Field(
        None,
        description="evaluation split; default: the first of validation, val, valid and test that exists "
        "(hf, conversations)",
    )
    image_size: int = Field(
        224, ge=8, le=4096, description="height and width in pixels (but digits, cifar10)"
    )
    classes: int = Field(1000, ge=2, le=1 << 24, description="number of classes (synthetic)")
    samples: int = Field(1024, ge=1, le=1 << 20, description="number of training samples (synthetic)")
    limit: int | None = Field(
        None,
        ge=1,
        description="maximum number of training samples, and of samples of each evaluation set, evenly "
        "spaced: for quick tries",
    )
    crop_area: tuple[_Share, _Share] = Field(
        (0.08, 1.0),
        description="smallest and largest fraction of an image's area that a training crop covers "
        "(but digits, cifar10, synthetic)",
    )
    eval_crop: float = Field(
        EVAL_CROP,
        ge=0.25,
        le=1,
        description="fraction of an image's short side that evaluation sees, timm's crop_pct; 0.875: 224 of "
        "256 "
        "(but digits, cifar10, synthetic)",
    )
    class_weights: Literal["balanced"] | dict[str, float] | None = Field(
        None,
        json_schema_extra={"words": "balanced | {class: number} | null"},
        description="draws training samples with replacement, as many as there are, by weights: balanced "
        "(each class as often as any other), or by class how much likelier one of its samples is (not named: "
        "1), such as {cat: 3}",
    )
    mix: dict[str, float] | None = Field(
        None,
        json_schema_extra={"words": "{path: number} | null"},
        description="several sets to learn from in place of data.path, by weight: samples of each are drawn "
        "in that proportion, and gone through again and again (conversations)",
    )
    augment: Literal["none", "flip", "crop", "affine"] = Field(
        "none",
        description="on the device: flip (left-right), crop (that, and shifted by up to an eighth) or affine "
        "(rotation, scale, shift)",
    )
    jitter: float = Field(
        0.0,
        ge=0,
        le=1,
        description="on the device: how far brightness, contrast and saturation of each image may change",
    )
    policy: Literal["none", "randaugment", "trivialaugment"] = Field(
        "none",
        description="on the device: torchvision's policy (nearest pixels, black outside), drawn for each "
        "group of policy_group images",
    )
    policy_magnitude: int = Field(
        9,
        ge=0,
        le=30,
        description="strength out of 30, where it turns by 30 degrees; timm and TensorFlow count to 10, so "
        "their 9 is 27 here (randaugment)",
    )
    policy_group: int = Field(
        8,
        ge=1,
        description="images of a micro-batch that share what a policy draws (randaugment, trivialaugment)",
    )

    def corrupt_samples(self, of: int) -> int:
        """Returns the number of samples that may be corrupt: the budget, at least one if it is above 0."""
        return math.ceil(self.corrupt_budget * of)

    @field_validator("crop_area")
    @classmethod
    def _shares_rise(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("the smallest fraction, then the largest, such as [0.08, 1.0]")
        return value

    @field_validator("class_weights", mode="before")
    @classmethod
    def _classes_have_names(cls, value: Any) -> Any:
        if value is None or value == "balanced":
            return value
        weights: dict[Any, Any] = value if isinstance(value, dict) else {"": None}
        for name, weight in weights.items():
            if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                of = f" (of {name}: {weight})" if value is weights else ""
                raise ValueError(
                    f"give balanced, or numbers from 0 on by class, such as {{cat: 3, dog: 0.5}}{of}"
                )
        return {str(name): weight for name, weight in weights.items()}

    @model_validator(mode="after")
    def _path_belongs_to_images(self) -> "DataConfig":
        if self.path is not None and FORMATS[self.name].place == "nowhere":
            raise ValueError(
                f"data.path is set but data.name={self.name} doesn't read it; "
                "add data.name=folder, or table, shards, pack"
            )
        for name in (str(self.path), *(self.mix or ())):
            if name.startswith("hub:") and (self.name != "conversations" or not HUB_SET.fullmatch(name)):
                raise ValueError(
                    f"data.path={name}: data.name=conversations reads hub:OWNER/NAME@REVISION, such as "
                    "hub:HuggingFaceH4/no_robots@main, or a file or folder of it, as in …@main:data"
                )
        return self

    @model_validator(mode="after")
    def _mix_replaces_path(self) -> "DataConfig":
        if self.mix is None:
            return self
        if self.name != "conversations":
            raise ValueError("data.mix is for data.name=conversations; leave it out")
        if self.path is not None:
            raise ValueError(
                "data.mix names all sets to learn from; put data.path among them, with its weight"
            )
        odd = [name for name, weight in self.mix.items() if weight <= 0]
        if odd or not self.mix:
            raise ValueError(f"data.mix: give a weight above 0 to each set{f' (of {odd[0]})' if odd else ''}")
        if urls := [name for name in self.mix if is_url(name)]:
            raise ValueError(f"data.mix: sets are files of this machine; copy {urls[0]} here")
        if self.class_weights is not None:
            raise ValueError("data.mix and data.class_weights are two ways to draw; leave one of them out")
        return self

    @model_validator(mode="after")
    def _draws_are_shuffled(self) -> "DataConfig":
        if not self.shuffle:
            for key in ("class_weights", "mix"):
                if getattr(self, key) is not None:
                    raise ValueError(f"data.shuffle=false: data.{key} draws samples at random; leave one out")
        return self

    @model_validator(mode="after")
    def _columns_belong_to_hf(self) -> "DataConfig":
        for key in ("input_column", "label_column", "eval_split"):
            read = ("hf",) if key == "label_column" else ("hf", "conversations")
            if self.name not in read and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"data.{key} is for data.name={' and '.join(read)}; leave it out")
        return self

    @model_validator(mode="after")
    def _several_classes_are_of_tables(self) -> "DataConfig":
        given = [key for key in ("label_separator", "label_columns") if getattr(self, key) is not None]
        if given and self.name != "table":
            raise ValueError(f"data.{given[0]} is for data.name=table; leave it out")
        if len(given) > 1 or (given and self.class_weights is not None):
            other = given[1] if len(given) > 1 else "class_weights"
            raise ValueError(f"data.{given[0]} and data.{other} don't go together; leave one of them out")
        return self

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _auto_is_chosen_before(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("a number is needed here; `trainer train` chooses one at the start")
        return value

    @field_validator("cache_limit")
    @classmethod
    def _limit_is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @model_validator(mode="after")
    def _urls_are_cached(self) -> "DataConfig":
        # Not in a validator of the field, whose error would repeat the URL with its secret.
        if not isinstance(self.path, str):
            if self.cache is not None or self.cache_limit is not None:
                raise ValueError(
                    "data.cache and data.cache_limit are for a data.path that is a URL; leave them out"
                )
            return self
        if self.index is not None:
            raise ValueError("data.index is for data of this machine, and data.path is a URL; leave it out")
        try:
            check_url(self.path)
        except ValueError as error:
            raise ValueError(f"data.path: {error}") from None
        if FORMATS[self.name].place != "path or URL":
            raise ValueError(
                f"data.path is a URL, and data.name={self.name} reads files of this machine; use "
                "data.name=pack or shards, or copy the data here"
            )
        if self.cache is None:
            raise ValueError(
                "data.path is a URL, so data.cache is needed: data.cache=DIR, a folder for copies"
            )
        return self


# Keys of one location, which a set with another kind of data or another path doesn't inherit.
_OF_PLACE = (
    *("path", "cache", "cache_limit", "input_column", "label_column", "label_separator", "label_columns"),
    "eval_split",
)


class EvaluationSetConfig(Section):
    """Further data set to evaluate on. Keys that are not given default to those of the section data."""

    name: Kind | None = None
    path: Annotated[Path | str | None, BeforeValidator(_as_path)] = None
    split: Annotated[str, Field(pattern=r"^[\w.\-]+$", max_length=100)] | None = None
    cache: Path | None = None
    cache_limit: Annotated[str | None, BeforeValidator(_as_text)] = None
    check: Check | None = None
    input_column: str | None = None
    label_column: str | None = None

    def on(self, data: DataConfig) -> DataConfig:
        """Returns the section data, overridden by the keys of this set.

        Raises:
            ValueError: If the keys don't go together; the message calls them keys of the section data.
        """
        said = {key: value for key, value in self if value is not None}
        kept = data.model_dump()
        kept["mix"] = None
        if not said.keys() - {"check"}:
            raise ValueError("is the same as the main set: give a path, a name or a split")
        kind = said.get("name", data.name)
        if kind != data.name:
            kept = {key: value for key, value in kept.items() if key not in _OF_PLACE}
        elif self.path is not None and not is_url(self.path):
            kept = {key: value for key, value in kept.items() if key not in ("cache", "cache_limit")}
        if (split := said.pop("split", None)) is not None:
            if not FORMATS[kind].splits:
                raise ValueError(f"data.split: data.name={kind} has no splits to choose from; leave it out")
            if kind in ("hf", "conversations"):
                said["eval_split"] = split
        try:
            return DataConfig.model_validate(kept | said)
        except ValidationError as error:  # its own text is a paragraph, and may repeat a URL
            problem = error.errors()[0]
            key = "".join(f"data.{part}: " for part in problem["loc"][:1])
            raise ValueError(key + problem["msg"].removeprefix("Value error, ")) from None


def is_url(path: object) -> bool:
    """True if a path is a URL; then it is a string."""
    return isinstance(path, str) and "://" in path


def at_home(path: Path, key: str) -> Path:
    """Returns a path with ~ expanded.

    Raises:
        BadInputError: If there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadInputError(f"{key}={path}: there is no such user; write the path out") from error


def check_url(url: str) -> None:
    """Checks that a URL can be read and holds no secret.

    Raises:
        ValueError: If not; the message doesn't repeat the URL.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.netloc, parts.port
    except ValueError as error:
        raise ValueError("not a URL: user, password and blanks don't belong there") from error
    if "@" in host or (parts.scheme == "s3" and (":" in host or port)):
        raise ValueError(
            "a URL with user or password would be written down with the run; leave them out: S3 reads "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws, https reads ~/.netrc"
        )
    if "?" in url or "#" in url:
        raise ValueError("a URL with ? or # can't be the root of a data set; give what comes before")
    if parts.scheme not in _SCHEMES or not host:
        raise ValueError("this URL can't be read; give s3://BUCKET/PATH or https://HOST/PATH")
