"""The types of device whose tensors this backend takes."""

from collections.abc import Sequence


def served_devices():
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Served(Sequence):
    """The same, found out whenever it is read: whether there is a GPU is nothing to ask a driver at `import torch`, and
    CUDA_VISIBLE_DEVICES may be set later."""

    def __getitem__(self, index):
        return served_devices()[index]

    def __len__(self):
        return len(served_devices())
