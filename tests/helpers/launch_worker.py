"""A rank for tests/launch/test_launch.py: of FOLDER WHAT... it does WHAT, or `0=WHAT 1=WHAT` by rank.

It leaves `FOLDER/ready-RANK` (its pid) once it can take signals, a line in `FOLDER/signals-RANK` for each one
that it takes, and a line in `FOLDER/starts-RANK` for each start. The launcher hands it the words in a
request, torchrun as arguments.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import trainer
from trainer.errors import EXIT_HANG, EXIT_REQUEUE
from trainer.host.files import write_whole
from trainer.launch import signals as preempt
from trainer.launch.folder import take_request
from trainer.launch.worker import Worker, current, leave_now, requested

LAUNCH = sys.argv[1] if len(sys.argv) == 2 else None
RANK = os.environ["RANK"]
WORDS = sys.argv[1:] if LAUNCH is None else take_request(Path(LAUNCH), int(RANK))["words"]
FOLDER = Path(WORDS[0])


def _record_signals() -> None:
    """Records signals, from before the first that the rank takes."""
    note = preempt.StopFlag.note

    def recorded(flag: preempt.StopFlag, number: signal.Signals) -> None:
        with (FOLDER / f"signals-{RANK}").open("a") as file:
            file.write(f"{number.name}\n")
        note(flag, number)

    preempt.StopFlag.note = recorded  # type: ignore[assignment, method-assign]


def _wait_for_a_request() -> signal.Signals:
    while (number := requested()) is None:
        time.sleep(0.01)
    return number


def _obey() -> int:
    _wait_for_a_request()
    time.sleep(0.2)  # time for a signal that should not come twice
    return EXIT_REQUEUE


def _obey_three() -> int:
    while len(set((FOLDER / f"signals-{RANK}").read_text().split()) if requested() else ()) < 3:
        time.sleep(0.01)
    return _obey()


def _stop() -> None:
    raise preempt.Stopped(_wait_for_a_request())


def _raise() -> None:
    (FOLDER / "raised").touch()
    raise ValueError(f"rank {RANK} is broken")


def _once() -> None:
    if len((FOLDER / f"starts-{RANK}").read_text().split()) == 1:
        _raise()


def _hang() -> None:
    threading.Timer(0.1, leave_now, (EXIT_HANG, "no step for 600 s")).start()
    time.sleep(1000)


def _hang_in_exit() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def _collective(broken: bool) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.barrier()
    try:
        if broken:
            _raise()
        distributed.all_reduce(torch.zeros(1))
    finally:  # as a context manager would: the others notice before this rank has left word
        distributed.destroy_process_group()
        time.sleep(0.3 if broken else 0.0)


def _agree() -> int:
    """Agrees on a stop as a run does: all stop when one is asked to."""
    import torch
    from torch import distributed

    if os.environ["WORLD_SIZE"] != "1":
        distributed.init_process_group("gloo")
    while True:
        asked = torch.tensor([float(requested() is not None)])
        if os.environ["WORLD_SIZE"] != "1":
            distributed.all_reduce(asked)
        with (FOLDER / "worlds").open("a") as file:
            file.write(f"{os.environ['WORLD_SIZE']}\n" if RANK == "0" else "")
        if asked:
            return EXIT_REQUEUE
        time.sleep(0.05)


def _leave_a_child() -> None:
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (FOLDER / "child").write_text(str(child.pid))


def _prepare() -> None:
    rank = current()
    assert rank is not None
    rank.prepares(lambda: False)
    time.sleep(1000)


def _tell() -> int:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "COLOR")
    told = {"arguments": WORDS[2:], **{name: os.environ.get(name) for name in names}}
    (FOLDER / f"told-{RANK}").write_text(json.dumps(told))
    if RANK == "1":
        return EXIT_REQUEUE
    time.sleep(0.2)  # time for a signal that should not come
    return 0


def _tell_paths() -> None:
    """Writes its search path, and the launch's variables that its child processes would see."""
    launchs = ("TRAINER", "PYTHONSAFEPATH")
    leaked = [name for name in os.environ if name.startswith(launchs) and name != "TRAINER_RANK_OF"]
    told = [trainer.__file__, sys.path, leaked, __spec__.name]
    (FOLDER / f"paths-{RANK}").write_text(json.dumps(told))


def _crash() -> None:
    ctypes.string_at(0)


WHAT: dict[str, Callable[[], int | None]] = {
    **{"agree": _agree, "crash": _crash, "hang": _hang, "hang-in-exit": _hang_in_exit, "stop": _stop},
    **{"leave-a-child": _leave_a_child, "obey": _obey, "obey-late": _obey, "obey-three": _obey_three},
    **{"once": _once, "prepare": _prepare, "tell": _tell, "tell-paths": _tell_paths},
    "collective": lambda: _collective(broken=False),
    "fail-1": lambda: _collective(broken=RANK == "1"),
    "fail-in-collective": lambda: _collective(broken=True),
    "sleep": lambda: time.sleep(1000),
}


def main() -> int | None:
    write_whole(FOLDER / f"ready-{RANK}", str(os.getpid()))
    with (FOLDER / f"starts-{RANK}").open("a") as file:
        file.write("start\n")
    by_rank = dict(word.split("=") for word in WORDS[1:] if "=" in word)
    return WHAT[by_rank.get(RANK, WORDS[1])]()


if __name__ == "__main__":
    while WORDS[1] == "obey-late" and not (FOLDER / "signal-sent").exists():
        time.sleep(0.01)
    _record_signals()
    with Worker(LAUNCH) as worker:
        worker.code = main()
    sys.exit(worker.exit_code)
