"""Lightning's trainer on the CPU, without its output and files."""

import logging

from lightning import Trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}
    return Trainer(callbacks=list(callbacks), **quiet | options)
