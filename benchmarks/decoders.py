"""Cost of decoding the crop of a JPEG with each installed decoder, and the largest possible saving.

Of these packages none decodes a part of an image alone, except libvips, which takes longer. What a module of
our own would save is measured by a few lines of C against libjpeg-turbo, where a compiler and its header are.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import io
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.loader import images_of
from benchmarks.paired import interleaved, median_interval
from benchmarks.pipelines import SIDE
from trainer.data.formats.crop import Box, random_cut
from trainer.data.formats.decode import cut_out, look, resize
from trainer.data.formats.files import in_folder
from trainer.errors import EXIT_DONE, BadInputError
from trainer.observe.conditions import conditions

Pixels = npt.NDArray[np.uint8]


class Jpeg(NamedTuple):
    """A file and the part of it that is wanted."""

    data: bytearray
    box: Box


# uint8 (height, width, 3) of the part; None where there are no pixels to compare.
Decode = Callable[[Jpeg], Pixels | None]


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="JPEGs by class (default: photographs made here)"
    )
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="interleaved rounds (default: 7)")
    bench.add_argument("--images", type=int, default=256, metavar="N", help="at most (default: 256)")
    bench.set_defaults(run=lambda options: bench_decoders(options.folder, options.rounds, options.images))


def bench_decoders(folder: Path | None, rounds: int, images: int) -> int:
    """Prints a table: CPU time, ratio to ours with its interval, difference of the pixels; exit code 0.

    Raises:
        BadInputError: If there is nothing to measure.
    """
    if rounds < 1 or images < 1:
        raise BadInputError("--rounds and --images: give numbers from 1 on")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        files = read_files(images_of(folder, Path(work, "images")), images)
        ways = {"trainer (torchvision)": ours, **installed(), **native(Path(work))}
        ways["trainer: resizing the crop"] = _resizing(files)
        times = np.array(interleaved([_timed(way, files) for way in ways.values()], rounds))
        apart = [_difference(way, files) for way in ways.values()]
    size, share = (np.mean(each) for each in zip(*map(_about, files), strict=True))
    print(
        f"{conditions()}\n{len(files)} JPEGs, {size / 1e3:.1f} kB on average, {share:.0%} of whose pixels "
        f"are in the crop; 1 thread, {rounds} interleaved rounds\n\n"
        "| what | CPU us per image (median) | of the first (95 % interval) | mean difference, levels |\n"
        "|---|---|---|---|"
    )
    for name, spent, levels in zip(ways, times, apart, strict=True):
        ratio, low, high = median_interval((spent / times[0]).tolist())
        print(
            f"| {name} | {np.median(spent) * 1e6 / len(files):,.0f} | {ratio:.2f} ({low:.2f} to {high:.2f}) "
            f"| {'' if levels is None else f'{levels:.4f}'} |"
        )
    return EXIT_DONE


def read_files(folder: Path, most: int) -> list[Jpeg]:
    """Reads JPEGs of a folder of classes, each with a crop as in training.

    Raises:
        BadInputError: If there are none.
    """
    records, random = in_folder(folder), np.random.default_rng(0)
    files = []
    for sample in np.linspace(0, len(records) - 1, min(most, len(records))).astype(int).tolist():
        data, numbers = records.read(sample), random.random(4).tolist()
        if (header := look(data)).kind == "jpeg":
            files.append(Jpeg(data, random_cut(header.height, header.width, *numbers)))
    if not files:
        raise BadInputError(f"{folder}: no JPEGs")
    return files


def ours(file: Jpeg) -> Pixels:
    """Decodes as training does before it resizes."""
    return cut_out(file.data, lambda *_: file.box)[0].permute(1, 2, 0).numpy()


def installed() -> dict[str, Decode]:
    """The decoders of packages that are here."""
    calls: Mapping[str, tuple[str, Callable[[Any, bytearray], Any]]] = {
        "pillow": ("PIL.Image", lambda image, data: np.asarray(image.open(io.BytesIO(data)).convert("RGB"))),
        "simplejpeg": ("simplejpeg", lambda module, data: module.decode_jpeg(data)),
        "imagecodecs": ("imagecodecs", lambda module, data: module.jpeg8_decode(bytes(data))),
        "kornia-rs": ("kornia_rs", lambda module, data: module.io.decode_image_jpegturbo(bytes(data), "rgb")),
        "opencv-python-headless": (
            "cv2",
            lambda module, data: module.imdecode(np.frombuffer(data, np.uint8), module.IMREAD_COLOR_RGB),
        ),
    }
    there: dict[str, Decode] = {}
    for package, (name, call) in calls.items():
        if (module := _imported(name)) is not None:
            there[_titled(package)] = _of_whole(module, call)
    if (module := _imported("pyvips")) is not None:
        there[f"{_titled('pyvips')}, crop"] = _vips(module)
    return there


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _titled(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def _of_whole(module: Any, call: Callable[[Any, bytearray], Any]) -> Decode:
    def decode(file: Jpeg) -> Pixels:
        top, left, height, width = file.box
        pixels: Pixels = call(module, file.data)[top : top + height, left : left + width]
        return pixels

    return decode


def _vips(module: Any) -> Decode:
    def decode(file: Jpeg) -> Pixels:
        top, left, height, width = file.box
        image = module.Image.new_from_buffer(bytes(file.data), "", access="sequential")
        pixels = image.crop(left, top, width, height).write_to_memory()
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)

    return decode


def native(work: Path) -> dict[str, Decode]:
    """The crop alone by libjpeg-turbo, and no more than its entropy decoding; nothing without a compiler."""
    library = work / "crop_decode.so"
    source = Path(__file__).with_name("crop_decode.c")
    command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ljpeg"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    code = ctypes.CDLL(str(library))

    def crop(file: Jpeg) -> Pixels:
        top, left, height, width = file.box
        out, wide = np.empty((height, (width + 64) * 3), np.uint8), ctypes.c_int()
        place = code.decode_crop(*_bytes(file), top, left, height, width, _pointer(out), ctypes.byref(wide))
        assert place >= 0
        rows = out.reshape(-1)[: height * wide.value * 3].reshape(height, wide.value, 3)
        return rows[:, place : place + width]

    def entropy(file: Jpeg) -> None:
        assert code.decode_entropy(*_bytes(file)) == 0

    return {
        "libjpeg-turbo from C, the crop alone": crop,
        "libjpeg-turbo from C, entropy decoding alone": entropy,
    }


def _bytes(file: Jpeg) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return _pointer(np.frombuffer(file.data, np.uint8)), ctypes.c_size_t(len(file.data))


def _pointer(array: Pixels) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _resizing(files: Sequence[Jpeg]) -> Decode:
    cuts = {id(file): torch.from_numpy(ours(file).copy()).permute(2, 0, 1)[None] for file in files}

    def only_resize(file: Jpeg) -> None:
        resize(cuts[id(file)], SIDE, SIDE)

    return only_resize


def _timed(decode: Decode, files: Sequence[Jpeg]) -> Callable[[], float]:
    def loop() -> float:
        began = time.process_time()
        for file in files:
            decode(file)
        return time.process_time() - began

    return loop


def _difference(decode: Decode, files: Sequence[Jpeg]) -> float | None:
    """Mean absolute difference to ours; None without pixels."""
    apart = []
    for file in files:
        if (pixels := decode(file)) is None:
            return None
        apart.append(np.abs(pixels.astype(np.int16) - ours(file)).mean())
    return float(np.mean(apart))


def _about(file: Jpeg) -> tuple[int, float]:
    """Bytes, and the share of the pixels that is wanted."""
    header = look(file.data)
    return len(file.data), file.box.height * file.box.width / (header.height * header.width)
