"""Batches of classes of other libraries, made by functions of a number; their sizes depend on
it.
"""

import importlib.machinery
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    tensorclass,
)


def values(number, *trailing, start=0.0):
    rows = 2 + number % 3
    count = rows * int(np.prod(trailing)) if trailing else rows
    return torch.arange(count, dtype=torch.float32).view(rows, *trailing) + start + number


# -- tensordict ------------------------------------------------------------------------------------


def plain_td(number):
    obs, inner = values(number, 3), values(number)
    source = {
        "z": obs,
        "a": {"deep": {"x": inner}},
        "text": "words",
        "none": TensorDict({}, [2 + number % 3]),
    }
    return TensorDict(source, [2 + number % 3])


def locked_td(number):
    """With names and a device, too."""
    source = {"obs": values(number, 3), "next": {"obs": values(number, 3)}}
    sizes = [2 + number % 3, 3]
    return TensorDict(source, sizes, names=["time", None], device="cpu", lock=True)


def td_with_objects(number):
    td = TensorDict({"obs": values(number)}, [2 + number % 3])
    td["meta"] = NonTensorData({"number": number}, batch_size=[2 + number % 3])
    return td


def lazy_stack(number):
    tds = [TensorDict({"obs": values(number + step, 3)}, []) for step in range(2)]
    return LazyStackedTensorDict(*tds, stack_dim=0, stack_dim_name="time")


def td_params(number):
    return TensorDictParams(TensorDict({"w": values(number, 3), "n": {"b": values(number)}}, []))


@tensorclass
class Decorated:
    obs: torch.Tensor
    label: str
    maybe: torch.Tensor | None = None


class Inherited(TensorClass):
    obs: torch.Tensor
    label: str


def decorated_tensorclass(number):
    return Decorated(obs=values(number, 3), label=f"number {number}", batch_size=[2 + number % 3])


def inherited_tensorclass(number):
    return Inherited(obs=values(number, 3), label=f"number {number}", batch_size=[2 + number % 3])


def memory_mapped(number):
    return [MemoryMappedTensor.from_tensor(values(number, 3)), values(number)]


# -- PyG -------------------------------------------------------------------------------------------


def edges(number):
    nodes = 2 + number % 3
    return torch.stack([torch.arange(nodes), torch.arange(nodes).flip(0)])


def graph(number):
    from torch_geometric.data import Data

    data = Data(
        x=values(number, 4),
        edge_index=edges(number),
        y=torch.tensor([number]),
        name=f"graph {number}",
    )
    data.extras = {"weights": [values(number)], "raw": None}
    data.table = np.arange(3)
    data.num_nodes = 2 + number % 3
    return data


def graph_batch(number):
    from torch_geometric.data import Batch, Data

    graphs = [
        Data(x=values(number + i, 4), edge_index=edges(number + i), text=f"{i}") for i in range(3)
    ]
    return Batch.from_data_list(graphs, follow_batch=["x"])


def hetero_graph(number):
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["paper"].x = values(number, 4)
    data["author"].x = values(number + 1, 2)
    data["author"].batch_size = number
    data["author", "writes", "paper"].edge_index = edges(number)
    data.year = 2000 + number
    data.weight = values(number)
    return data


def hetero_batch(number):
    from torch_geometric.data import Batch

    return Batch.from_data_list([hetero_graph(number), hetero_graph(number + 1)])


def temporal(number):
    from torch_geometric.data import TemporalData

    count = torch.arange(2 + number % 3)
    return TemporalData(src=count, dst=count + 1, t=count * 2, msg=values(number, 5))


# -- torchrec --------------------------------------------------------------------------------------


def kjt(number):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.tensor([number % 3, 2, 1, 0, 3, number % 2])
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(total) + number,
        weights=torch.arange(total) / 2,
        lengths=lengths,
    )


def kjt_with_caches(number):
    made = kjt(number)
    made.offset_per_key(), made.index_per_key(), made.stride(), made.to_dict()
    return made


def kjt_of_variable_strides(number):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.tensor([number % 3, 2, 1])
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(int(lengths.sum())),
        lengths=lengths,
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )


def kjt_to(made, device):
    """Move as torchrec does, without its cached tensors."""
    moved = made.to(device)
    moved._jt_dict = None
    return moved


def jagged(number):
    from torchrec.sparse.jagged_tensor import JaggedTensor

    return JaggedTensor(values(number, 2), lengths=torch.tensor([1, 1 + number % 3]))


def keyed(number):
    from torchrec.sparse.jagged_tensor import KeyedTensor

    return KeyedTensor(["a", "b"], [1, 2], values(number, 3))


def torchrec_batch(number):
    from torchrec.datasets.utils import Batch

    return Batch(values(number, 3), kjt(number), torch.arange(3))


# -- transformers ----------------------------------------------------------------------------------


def dynamic_cache(number):
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(2):
        cache.update(values(number, 4, 3, 2), values(number, 4, 3, 2, start=9.0), layer)
    return cache


def encoder_decoder_cache(number):
    from transformers import EncoderDecoderCache

    return EncoderDecoderCache(dynamic_cache(number), dynamic_cache(number + 1))


def model_output(number):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=values(number, 3), past_key_values=dynamic_cache(number))


def encoding(number):
    from transformers import BatchEncoding

    return BatchEncoding(
        {"input_ids": values(number, 3).long(), "attention_mask": values(number, 3).bool()}
    )


# -- pydantic --------------------------------------------------------------------------------------


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow")
    x: torch.Tensor
    name: str = "none"


class Frozen(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)
    inner: Model
    items: list[torch.Tensor]
    _hidden: torch.Tensor = PrivateAttr(default_factory=lambda: torch.ones(3))


def model(number):
    return Model(x=values(number, 3), more=values(number))


def frozen_model(number):
    return Frozen(inner=model(number), items=[values(number), values(number + 1)])


# -- tensors of other classes ----------------------------------------------------------------------


def tv_tensors():
    """Return torchvision's own module, from the package without its binary, which needs another
    build of torch.
    """
    if "torchvision" not in sys.modules:
        folder = Path(
            os.environ.get("PINSTAGE_TORCHVISION", Path(sys.prefix) / "torchvision-source")
        )
        package = folder / "torchvision"
        assert (package / "tv_tensors").is_dir(), (
            f"no torchvision in {folder}: python -m pip install --no-deps --target {folder} "
            "torchvision"
        )
        stand_in = types.ModuleType("torchvision")
        stand_in.__path__ = [str(package)]
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchvision", None, is_package=True)
        sys.modules["torchvision"] = stand_in
    import torchvision.tv_tensors

    return torchvision.tv_tensors


def detection(number):
    """Return a batch of 34 leaves, 16 of them in torchvision's classes."""
    tv = tv_tensors()
    size = (8 + number, 9)
    images = [tv.Image(torch.arange(3 * size[0] * 9).view(3, *size) % 255) for _ in range(4)]
    targets = [
        {
            "boxes": tv.BoundingBoxes(torch.ones(number + i, 4), format="XYXY", canvas_size=size),
            "masks": tv.Mask(torch.zeros(number + i, *size, dtype=torch.uint8)),
            "points": tv.KeyPoints(torch.ones(number + i, 2), canvas_size=size),
            "labels": torch.arange(number + i),
            "image_id": torch.tensor(i),
            "area": torch.ones(number + i),
            "iscrowd": torch.zeros(number + i),
        }
        for i in range(4)
    ]
    return {
        "images": images,
        "targets": targets,
        "step": torch.tensor(number),
        "scale": torch.ones(1),
    }


def meta_tensor(number):
    from monai.data import MetaTensor

    image = MetaTensor(
        values(number, 3, 2), affine=torch.eye(4) * (number + 1), meta={"file": f"{number}.nii"}
    )
    image.push_applied_operation({"class": "Flip", "number": number})
    return image


def batch_of_meta_tensors(number):
    from monai.data.utils import list_data_collate

    return list_data_collate([{"image": meta_tensor(number), "label": number} for _ in range(2)])
