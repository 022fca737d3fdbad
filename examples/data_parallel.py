"""Data parallel training: the same script alone and on any number of processes, with the same losses.

python data_parallel.py
torchrun --standalone --nproc-per-node 2 data_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from proxsps import ProxSPS

if "RANK" in os.environ:  # set by torchrun
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
world = dist.get_world_size() if dist.is_initialized() else 1

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)).double()
model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1)).double()
data = torch.randn(50, 96, 10).double()  # 50 batches of 96 rows, of which every rank takes its part
if dist.is_initialized():
    model = DistributedDataParallel(model)

opt = ProxSPS(model.parameters(), lr=10.0, weight_decay=1e-4)
for x in data:
    mine = x.chunk(world)[rank]
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(mine), teacher(mine).detach())
    loss.backward()
    opt.step(loss=loss)  # loss and sums of all ranks, in one all-reduce
    if rank == 0:
        joint = float(opt.last_step.gap)  # the loss of the joint batch above its lower bound 0

if rank == 0:
    print(f"loss of the last joint batch: {joint:.10f}")
if dist.is_initialized():
    dist.destroy_process_group()
