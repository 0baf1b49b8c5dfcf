"""Runs torchrun's own code for a launch of several ranks: `agent FOLDER MODULE OPTIONS-OF-TORCHRUN`.

It starts the module for each rank and writes which ones failed. It receives no signal, and its log is not
shown.
"""

import json
import logging
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.host.files import write_whole
from trainer.host.interfaces import from_files_alone
from trainer.launch import as_launcher
from trainer.launch.folder import read_launch, write_launch
from trainer.launch.worker import die_with_parent


def listen(address: str) -> socket.socket:
    """Opens a socket on a free port of the first address of the name, which clients also try first."""
    family, *_, at = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(at[:2], family=family, backlog=1024)


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
    with from_files_alone(address):
        try:
            return TCPStore(address, port, **how)
        except NotImplementedError:  # by libuv torch 2.5 opens its port itself
            return TCPStore(address, port, use_libuv=False, **how)


def main(folder: Path, module: str, options: Sequence[str]) -> None:
    """Runs the ranks of one launch on this host."""
    launch = read_launch(folder)
    die_with_parent(launch.parent)
    write_launch(folder, replace(launch, parent=os.getpid()))
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
    exits, error, store = dict[int, int](), "", None
    try:
        if not request.master_port:  # all ranks are here
            listening = listen(request.master_addr)
            request.master_port = listening.getsockname()[1]
            store = store_on(listening, request.master_addr)
        with from_files_alone(request.master_addr):
            run.run(request)
    except ChildFailedError as failed:
        exits = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    except BaseException:
        error = traceback.format_exc()
    del store  # not before the ranks have ended
    write_whole(folder / "torchrun.json", json.dumps({"exits": exits, "error": error}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
