"""One of two ranks that train an adapter: FOLDER OUTPUT RANK."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

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
parallel = torch.nn.parallel.DistributedDataParallel(model)
ids = tokens(seed=rank)
parallel(ids, labels=ids).loss.backward()
found = {name: one.grad for name, one in parallel.named_parameters() if one.grad is not None}
torch.save(found, output / f"{rank}.pt")
dist.destroy_process_group()
