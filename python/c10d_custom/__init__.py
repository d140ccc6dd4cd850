"""A torch.distributed backend named "custom": ``init_process_group("custom")``.

Importing torch is enough: the entry point group ``torch.backends`` calls `autoload`. So is importing
this package, where TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns entry points off.
"""
from ._version import __version__

__all__ = ["__version__", "autoload", "register", "shrink_group"]


def autoload():
    """Registers the backend while torch is imported. Never raises: that would break ``import torch``."""
    try:
        register()
    except Exception as error:
        import warnings

        warnings.warn(f"c10d-custom could not register its backend: {error!r}", RuntimeWarning, stacklevel=2)


def register():
    """Registers "custom" for CPU and CUDA tensors with torch.distributed, and the rendezvous under an MPI
    launcher; again does nothing."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "CUSTOM"):
        dist.Backend.register_backend("custom", _create, extended_api=True, devices=["cpu", "cuda"])
        from . import launcher, rendezvous

        launcher.fill_environment()
        rendezvous.install()


def shrink_group(timeout=None):
    """After a loss: makes the ranks of the default group that are alive the new default group, and returns it. See shrink.py."""
    from .shrink import shrink_group

    return shrink_group(timeout)


def _create(options, _backend_options):
    from .process_group import create

    return create(options)


autoload()
