"""One of two ranks that train an adapter: FOLDER OUTPUT RANK ddp|fsdp."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from tiny import logits, tokens
from training import RATE, STEPS, packed, randomize, seed_of

import ktk.sft
from ktk.sft.trainer import FOLDER

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
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in model.parameters())
factors = {name: one for name, one in model.named_parameters() if one.requires_grad}
optimizer = torch.optim.SGD(factors.values(), lr=RATE)


def whole(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


found = []
for step in range(STEPS):
    optimizer.zero_grad()
    ids = tokens(seed=seed_of(step, rank))
    wrapped(ids, labels=ids).loss.backward()
    found.append({name: whole(one.grad) for name, one in factors.items()})
    optimizer.step()
torch.save(found, output / f"{rank}.pt")

trained = {name: whole(one) for name, one in factors.items()}
torch.save(trained, output / f"trained-{rank}.pt")
args = SimpleNamespace(output_dir=output)
state = SimpleNamespace(global_step=STEPS, is_world_process_zero=rank == 0)
ktk.sft.SaveAdapters().on_save(args, state, None, model=model)
dist.barrier()
with torch.no_grad():
    for one in factors.values():
        one.zero_()
    wrapped(ids)  # after which each rank has all factors, until it is told to keep its own
ktk.sft.load_adapter(model, output / f"checkpoint-{STEPS}" / FOLDER)
for name, one in model.named_parameters():
    if name in factors:
        assert one is factors[name], name
        assert torch.equal(whole(one), trained[name]), name
if sys.argv[4] == "fsdp":
    for layout in ("peft", "peft-fused"):
        ktk.sft.save_adapter(model, output / layout, layout)
    other = packed(folder)
    ktk.sft.add_lora(other, rank=3)
    ktk.sft.save_adapter(other, output / f"rank-3-{rank}")
    with pytest.raises(ValueError, match=r"and the files have rank 3 .* before fully_shard$"):
        ktk.sft.load_adapter(model, output / f"rank-3-{rank}")
    ktk.sft.merge(model)
    torch.save(logits(model, tokens()), output / f"merged-{rank}.pt")
dist.destroy_process_group()
