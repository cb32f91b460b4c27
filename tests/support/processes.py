"""Several processes on this machine, as torchrun starts them: they share a gloo group, and Trainers start no more.

They are forked from one that has imported what takes seconds, and has done nothing since.
"""

import faulthandler
import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = ["lightning.pytorch", "torch.distributed.fsdp", "lightning_nm"]


def forkserver(*modules):
    """Starts processes; the first call of a session decides which modules they have imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *modules])
    return context


def in_processes(world, folder, function, *args):
    """What ``function(*args)`` returns in each of `world` processes, in the order of their ranks."""
    folder.mkdir(exist_ok=True)
    forkserver()
    mp.start_processes(
        _enter, (world, str(folder), function, args), nprocs=world, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _enter(rank, world, folder, function, args):
    faulthandler.enable()  # pytest enables its own in the parent alone: an abort here would say nothing
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
    }
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    torch.save(function(*args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
