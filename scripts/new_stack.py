#!/usr/bin/env python3
"""Makes a new stack from an old one with another torch: `make stack FROM=torch2.9-cu128 TORCH=2.14.1`.

It keeps the old stack's conda half and, where it can, its other wheels. What the new torch brings
(torchvision, CUDA, cuDNN, NCCL, Triton) is what resolving it says; its GPUs are what the installed torch
says. Then the tests marked compat run on the new stack and on the old. Where it can't be locked or installed,
no new folder is left.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lock
import stack_table
from conda_lock import FILES, read_toml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# torchaudio ends here; from torch 2.15 on, of CUDA 13.2, its import fails. The trainer itself needs none.
LAST_AUDIO, LAST_WITH_AUDIO = "2.11.0", (2, 14)
WHERE = {
    **{"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"},
    **{"python_version": "3.12", "python_full_version": "3.12.0", "implementation_name": "cpython"},
    "platform_python_implementation": "CPython",
}
ARCHITECTURES = "import torch; print(torch._C._cuda_getArchFlags() or '')"


class StackError(Exception):
    """Raised where there is no new stack, with the reason in one line."""


def audio_of(torch: str) -> str:
    """The torchaudio that fits a torch; "" for none."""
    major, minor = map(int, torch.split(".")[:2])
    if (major, minor) > LAST_WITH_AUDIO:
        return ""
    return torch if (major, minor) <= (2, 10) else LAST_AUDIO


def brought(resolved: str) -> dict[str, str]:
    """Returns the packages that a torch needs on Linux x86_64, from its resolution (`name==version ; marker`
    lines).

    Raises:
        StackError: something is missing.
    """
    lines = [Requirement(one.rstrip(" \\")) for one in resolved.splitlines() if re.match(r"[\w.-]+==", one)]
    held = {
        one.name: str(one.specifier).removeprefix("==")
        for one in lines
        if one.marker is None or one.marker.evaluate(WHERE)
    }

    def one(*names: str) -> str:
        found = [held[name] for name in names if name in held]
        if not found:
            raise StackError(
                f"torch {held.get('torch', '')} brings no {names[0]}: its stack must be made by hand"
            )
        return found[0]

    # From CUDA 13 on the toolkit's wheels carry no suffix.
    runtime = one("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
    return {
        "torchvision": one("torchvision"),
        "cuda": ".".join(runtime.split(".")[:2]),
        "cudnn": one("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
        "nccl": one("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "triton": one("triton"),
    }


def drivers(cuda: str, given: str, stacks: Path) -> tuple[str, str]:
    """Native driver and floor of a CUDA: as given (NATIVE,FLOOR), or as another stack has them.

    Raises:
        StackError: neither says.
    """
    if given:
        found = re.fullmatch(r"(\d+[\d.]*),(\d+[\d.]*)", given)
        if not found:
            raise StackError(f"DRIVER={given}: give NATIVE,FLOOR as 580.65.06,580")
        return found[1], found[2]
    for file in sorted(stacks.glob("*/stack.toml")):
        stack = read_toml(file)
        if stack["brings"]["cuda"] == cuda:
            return stack["driver"]["native"], stack["driver"]["floor"]
    raise StackError(
        f"no stack has CUDA {cuda}: give DRIVER=NATIVE,FLOOR from the release notes of that toolkit"
    )


def described(
    old: str, name: str, pins: Mapping[str, str], brings: Mapping[str, str], driver: tuple[str, str]
) -> str:
    """The new stack.toml, from the text of the old."""

    def put(text: str, key: str, value: str) -> str:
        return re.sub(rf'(?m)^{key} = ".*?"', f'{key} = "{value}"', text)

    text = old.replace(str(re.search(r'(?m)^name = "(.*)"', old)[1]), name)  # type: ignore[index]
    text = put(text, "about", f"PyTorch {pins['torch']} with CUDA {brings['cuda']}.")
    year, month = time.gmtime()[:2]
    text = re.sub(r"(?m)^(supported_until = )\S+", rf"\g<1>{year + 1}-{month:02}-28", text)
    for key, value in {**pins, **brings}.items():
        text = put(text, key, value)
    if "torchaudio" not in pins:
        text = re.sub(r'(?m)^torchaudio = ".*"\n', "", text)
    text = put(put(text, "native", driver[0]), "floor", driver[1])
    return re.sub(r"(?ms)^# GB unpacked\..*?(?=^# |^\[(?!budget)|\Z)", "", text).rstrip() + "\n"


def with_architectures(text: str, flags: str) -> str:
    """stack.toml with the GPUs that a torch names (`sm_80 sm_90a`).

    Raises:
        StackError: it names none.
    """
    found = list(dict.fromkeys(re.findall(r"sm_\d+", flags)))
    if not found:
        raise StackError("the installed torch names no GPU: it is built without CUDA")
    return re.sub(r"(?m)^architectures = \[.*\]", f"architectures = {found}".replace("'", '"'), text)


def documented(page: str, name: str, stack: Mapping[str, Any]) -> str:
    """docs/stacks.md with a row for the stack, before the first that is there."""
    gpus = f"{stack['gpu']['architectures'][0]} to {stack['gpu']['architectures'][-1]}"
    facts = f"{stack['pins']['torch']}, {stack['brings']['cuda']}; wheels"
    row = f"| `{name}` | {facts} | {gpus} | {stack['driver']['floor']} | {stack['supported_until']} |\n"
    return page if f"| `{name}`" in page else re.sub(r"(?m)^(\|(?:-+\|)+\n)", rf"\g<1>{row}", page, count=1)


def call(*words: object) -> None:
    """Runs a program, and prints its words.

    Raises:
        StackError: it failed.
    """
    print("stack:", *words, flush=True)
    if subprocess.call([str(word) for word in words], cwd=ROOT):
        raise StackError(f"{' '.join(map(str, words[1:4]))} failed (above)")


def make(base: str, torch: str, driver: str, tests: bool) -> str:
    """Makes the stack and returns its name.

    Raises:
        StackError: it can't be made; there is no new folder then.
    """
    stacks = ROOT / "stacks"
    old = stacks / base
    if not (old / "stack.toml").is_file():
        raise StackError(f"FROM={base}: no such folder of stacks/")
    if not re.fullmatch(r"\d+\.\d+\.\d+", torch):
        raise StackError(f"TORCH={torch}: give a release, as 2.14.1")
    if read_toml(old / "stack.toml")["kind"] != "wheels":
        raise StackError(f"FROM={base} is conda's, whose channel ended with torch 2.5.1: give one of wheels")
    audio = {"torchaudio": audio_of(torch)} if audio_of(torch) else {}
    asked = [f"torch=={torch}", "torchvision", *(f"{key}=={value}" for key, value in audio.items())]
    uv = shutil.which("uv", path=Path(sys.prefix) / "bin") or shutil.which("uv") or "uv"
    with tempfile.TemporaryDirectory() as temporary:
        try:
            said = lock.resolve(uv, asked, "", Path(temporary))
        except (OSError, subprocess.CalledProcessError):
            raise StackError(f"uv finds no torch {torch} with a torchvision (above)") from None
    brings = brought(said)
    pins = {"torch": torch, "torchvision": brings.pop("torchvision"), **audio}
    name = f"torch{'.'.join(torch.split('.')[:2])}-cu{brings['cuda'].replace('.', '')}"
    new, venv = stacks / name, ROOT / "build/compat" / name
    if new.exists():
        raise StackError(f"stacks/{name} is there: make lock STACK={name} locks it anew")
    text = described(
        (old / "stack.toml").read_text(), name, pins, brings, drivers(brings["cuda"], driver, stacks)
    )
    try:
        new.mkdir()
        (new / "stack.toml").write_text(text)
        for file in (*FILES.values(), "records.json", "environment.yml", "wheels.lock"):
            (new / file).write_text((old / file).read_text().replace(base, name))
        call(sys.executable, "scripts/lock.py", "--stack", name, "--only", "wheels")
        call(
            sys.executable,
            "scripts/bootstrap.py",
            "--stack",
            name,
            "--venv",
            venv,
            "--groups",
            "train",
            "test",
        )
        flags = subprocess.run(
            [venv / "bin/python", "-c", ARCHITECTURES], capture_output=True, text=True, check=True
        )
        (new / "stack.toml").write_text(with_architectures((new / "stack.toml").read_text(), flags.stdout))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    stack_table.main()
    page = ROOT / "docs/stacks.md"
    page.write_text(documented(page.read_text(), name, read_toml(new / "stack.toml")))
    for one in (name, base) if tests else ():
        where = ROOT / "build/compat" / one
        call(
            sys.executable,
            "scripts/bootstrap.py",
            "--stack",
            one,
            "--venv",
            where,
            "--groups",
            "train",
            "test",
        )
        call(where / "bin/python", "-m", "pytest", "-m", "compat", "-n", "auto", "--dist", "loadgroup")
    return name


def main(words: Sequence[str] | None = None) -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Makes a new stack from an old one with another torch.")
    add = parser.add_argument
    add("--base", required=True, metavar="STACK", help="folder of stacks/ to begin with")
    add("--torch", required=True, metavar="VERSION", help="release of PyTorch")
    add("--driver", default="", metavar="NATIVE,FLOOR", help="for a CUDA that no stack has yet")
    add("--no-tests", action="store_true", help="don't run the tests marked compat on both")
    options = parser.parse_args(words)
    try:
        name = make(options.base, options.torch, options.driver, not options.no_tests)
    except (StackError, OSError, subprocess.CalledProcessError) as error:
        print(f"stack: {error}", file=sys.stderr)
        return 2
    print(
        f"stack: stacks/{name} is made: make image STACK={name}; the workflow image has a list of stacks, too"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
