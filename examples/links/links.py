"""Times all_reduce over the ranks of a job at five sizes, with nccl-tests' bus bandwidth."""

import os
import time

import torch
from torch import distributed as dist

TURNS = 10

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
ranks = dist.get_world_size()
for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << (30 if gpu else 25)):
    values = torch.ones(size // 4, device=device)
    dist.all_reduce(values)
    assert values.eq(ranks).all(), f"a sum of {size} bytes is wrong"
    values.zero_()
    for turn in range(TURNS + 5):
        if turn == 5:  # those before were to warm up
            dist.barrier()
            began = time.perf_counter()
        dist.all_reduce(values)
    if gpu:
        torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - began) / TURNS, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the slowest rank's
    rate = size / seconds.item() / 1e9
    if dist.get_rank() == 0:
        bus = rate * 2 * (ranks - 1) / ranks
        print(f"{size:>10} bytes  {seconds.item() * 1e6:>10.1f} us  {rate:.3f} GB/s  bus {bus:.3f} GB/s")
dist.destroy_process_group()
