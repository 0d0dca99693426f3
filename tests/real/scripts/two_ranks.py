"""Starts a training program on two ranks. Prints what each rank has measured by itself, without cbtop."""

import os
import socket
import subprocess
import sys

import torch

RANKS = 2


def run(main):
    """Run `main(rank)` in two processes of one process group. `main` is a function of the program."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        main(int(os.environ["RANK"]))
        torch.distributed.destroy_process_group()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=shared | {"RANK": str(rank)}) for rank in range(RANKS)]
    sys.exit(max(rank.wait() for rank in ranks))
