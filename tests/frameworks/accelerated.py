"""Trains with Accelerate, accumulating over three batches, for tests of prefetchers and loaders."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset


def samples(count=32):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)
    )


def prepared(workers):
    """Return a stateful loader of eight batches of numbers."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loader = DataLoader(range(32), 4, num_workers=workers)
    return Accelerator(cpu=True, dataloader_config=config).prepare(loader)


def state_after_three(batches):
    """Take three batches; return the state then."""
    for number, _ in enumerate(batches, 1):
        if number == 3:
            return batches.state_dict()
    raise AssertionError("there were fewer batches")


def train(wrap, *, dataset=samples, batch_size=4, shuffle=False, workers=0, skipped=0, **options):
    """Train for two epochs on the prepared loader, wrapped by `wrap`.

    Returns:
        The weights after each step, the gathered values of each batch, and the loader.
    """
    torch.manual_seed(0)
    configuration = DataLoaderConfiguration(**options)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=3, dataloader_config=configuration
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        dataset(), batch_size, shuffle=shuffle or None, generator=generator, num_workers=workers
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if skipped:
        loader = skip_first_batches(loader, skipped)
    loader = wrap(loader)
    steps, gathered = [], []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                if accelerator.sync_gradients:
                    steps.append([parameter.detach().clone() for parameter in model.parameters()])
                optimizer.zero_grad()
            gathered.append(
                (
                    accelerator.gather_for_metrics(targets),
                    accelerator.gradient_state.end_of_dataloader,
                )
            )
        assert accelerator.gradient_state.active_dataloader is None
    return steps, gathered, loader
