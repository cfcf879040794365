"""One of two ranks that train an adapter: FOLDER OUTPUT RANK ddp|fsdp."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from tiny import tokens
from training import packed, randomize

import ktk.sft

folder, output, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{output}/meet", rank=rank, world_size=2)
model = packed(folder)
for one in model.parameters():
    one.requires_grad_(False)
randomize(ktk.sft.add_lora(model, rank=2))
wrapped: torch.nn.Module = model
if sys.argv[4] == "ddp":
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
ids = tokens(seed=rank)
wrapped(ids, labels=ids).loss.backward()
found = {}
for name, one in model.named_parameters():
    grad = one.grad
    if grad is not None:
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
torch.save(found, output / f"{rank}.pt")
dist.destroy_process_group()
