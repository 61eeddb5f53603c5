"""Post-local SGD in a loop of Hugging Face's accelerate, with gradient accumulation.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_script.py

Alone it is training in one process. On GPUs `accelerate launch` starts it as well.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import meantime as mt
from meantime.adapters import AveragingOptimizer, post_local_hook

EPOCHS, WARMUP, PERIOD, BATCH = 12, 50, 8, 16


def main():
    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    several = accelerator.num_processes > 1

    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(bunch.target)[order]
    (images, test_images), (labels, test_labels) = images.split(1437), labels.split(1437)
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    averaging = AveragingOptimizer(
        torch.optim.AdamW(model.to(accelerator.device).parameters(), lr=2e-3),
        mt.periodic(mt.average_params(), every=PERIOD, after=WARMUP),
        replicas=mt.Distributed() if several else mt.Solo(),
    )
    model, optimizer, loader = accelerator.prepare(model, averaging, loader)
    if several:  # `model` is a DistributedDataParallel: gradients are for the warm-up only
        model.register_comm_hook(None, post_local_hook(averaging))

    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()  # every second time, and counted then
                optimizer.zero_grad()
    averaging.average_now()

    with torch.no_grad():
        predicted = model(test_images.to(accelerator.device)).argmax(1).cpu()
    accuracy = (predicted == test_labels).float().mean().item()
    accuracies = accelerator.gather(torch.tensor([accuracy], device=accelerator.device))
    if accelerator.is_main_process:
        print("test accuracy of each process:", accuracies.cpu().numpy().round(3), flush=True)
    if several:
        dist.destroy_process_group()
        os._exit(0)  # with gloo, torch 2.13 now and then aborts while the interpreter shuts down


if __name__ == "__main__":
    main()
