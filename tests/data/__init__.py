"""Data: tests of what is read, packed, fetched and loaded."""

import multiprocessing

# Of what comes from multiprocessing's server of forks, the server imports torch, once; and not each process.
multiprocessing.set_forkserver_preload(["trainer.data.loader", "trainer.data.decode"])
