"""What on this machine makes copies to the GPU slow, and what to do about it.

Facts are gathered first (`_host`, `_gpus`, and the measurement of `.._bandwidth`); the checks (`_host_checks`,
`_gpu_checks`, `_software_checks`, `_transfer_checks`) are pure functions of facts, so that each of their branches is
tested without the machine that it is about; `_doctor` puts them together and `_plot` draws the bandwidth.
"""

from ._check import Check
from ._doctor import POINTS, Diagnosis, diagnose
from ._gpu_checks import link_rate
from ._plot import save_plot

__all__ = ["POINTS", "Check", "Diagnosis", "diagnose", "link_rate", "save_plot"]
