"""Runs torchrun's own code for a launch of several ranks: `agent FOLDER MODULE OPTIONS-OF-TORCHRUN`.

It starts the module for each rank and writes which ones failed. It receives no signal, and its log is not
shown.
"""

import json
import logging
import os
import platform
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_FAILED, BadInputError
from trainer.host.files import write_whole
from trainer.host.interfaces import from_files_alone
from trainer.host.torch_build import torch_build
from trainer.launch import as_launcher
from trainer.launch.exit_record import TORCHRUN, ExitRecord, record_of
from trainer.launch.folder import read_launch, write_launch
from trainer.launch.meeting import AbsentNodeError, Meeting, listen, meet, read_meeting, wait_for_node_0
from trainer.launch.worker import die_with_parent
from trainer.observe.console import tell, tell_as

_LEFT_SECONDS = 3.0  # that the store stays for ranks of other nodes, which look in it why they lost one


def store_on(listening: socket.socket, address: str) -> Any:
    """Makes torch's store on a socket, until it is released; its threads don't survive a fork.

    By itself torch's TCPStore listens on all interfaces, whatever address it is given. torchrun, run in this
    process, takes this one for the one that it wants at that port (multi_tenant).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, file = listening.getsockname()[1], listening.detach()
    how: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "multi_tenant": True,
        "master_listen_fd": file,
    }
    if torch_build().version.startswith("2.5."):  # by libuv it opens its port itself
        how["use_libuv"] = False
    with from_files_alone(address):
        return TCPStore(address, port, **how)


def main(folder: Path, module: str, options: Sequence[str]) -> None:
    """Runs the ranks of one launch on this host."""
    launch = read_launch(folder)
    die_with_parent(launch.parent)
    write_launch(folder, replace(launch, parent=os.getpid()))
    tell_as(launch.told, 0)
    # Its log lines, its warnings and its traceback tell users nothing that the ranks don't tell better.
    logging.disable()
    warnings.simplefilter("ignore")
    given = os.environ.copy()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read at the import; not for the ranks
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    os.environ.update(given)
    script = [as_launcher.__file__, module, str(folder)]
    request = run.parse_args([*options, *(word.replace("$", "$$") for word in script)])  # it expands `$`
    if request.nnodes == "1":  # it looks its own name up again and again, for logs that nobody reads
        socket.getfqdn = lambda name="": name or "localhost"
    exits, record, store = dict[int, int](), None, None
    try:
        with from_files_alone(request.master_addr):
            if request.node_rank == 0:
                listening = listen(request.master_addr, request.master_port)
                request.master_port = listening.getsockname()[1]
                store = store_on(listening, request.master_addr)
            if (meeting := read_meeting(folder)) is not None:
                os.environ |= _met(meeting, store)
            (folder / "met").touch()
            run.run(request)
    except ChildFailedError as failed:
        exits = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    except (BadInputError, AbsentNodeError) as error:
        record = record_of(TORCHRUN, EXIT_FAILED, error if isinstance(error, BadInputError) else None)
        record = replace(record, line=str(error), for_all=True)
    except BaseException:
        record = ExitRecord(TORCHRUN, EXIT_FAILED, traceback=traceback.format_exc())
    if exits and store is not None and request.nnodes != "1":
        time.sleep(_LEFT_SECONDS)
    del store  # not before the ranks have ended
    report = {"exits": exits, "record": None if record is None else asdict(record)}
    write_whole(folder / "torchrun.json", json.dumps(report))


def _met(meeting: Meeting, store: Any) -> dict[str, str]:
    """Meets the other nodes; returns environment variables for the ranks."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    nodes = meeting.nodes

    def say(text: str) -> None:
        tell(f"trainer: node {nodes.number} ({platform.node()}) {text}\n", "info")

    try:
        if store is None:
            wait_for_node_0(meeting, say)
            wait = timedelta(seconds=meeting.seconds)
            store = TCPStore(nodes.host, nodes.port, None, False, wait, wait_for_workers=False)
        found = meet(PrefixStore("meeting", store), meeting, say)
    except RuntimeError as error:
        raise AbsentNodeError(f"{nodes.name(0)} has ended: it says why") from error
    ranks = range(nodes.number * meeting.ranks, (nodes.number + 1) * meeting.ranks)
    say(f"starts ranks {ranks[0]} to {ranks[-1]} of {nodes.total * meeting.ranks}")
    return {name: value for name, value in found.items() if name not in os.environ}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
