"""Families of models in numbers: tensors, operations, activations."""
