"""dtrain: multi-node PyTorch training with a checkpoint of every step for (almost) nothing."""

__version__ = "0.1.0"
