"""The spec that `dtrain init` writes: small, commented, and it runs as it is."""

from __future__ import annotations

TEMPLATE = """\
# A job for dtrain.    check it:  dtrain validate spec.yaml
#                      plan it:   dtrain plan spec.yaml
#                      run it:    dtrain run spec.yaml
# Editors complete keys with `dtrain schema > dtrain.schema.json` and, as the first line of this file,
# the comment  yaml-language-server: $schema=dtrain.schema.json
name: my-run
output_dir: runs/my-run        # of this one run; ~ and ${VAR} expand in paths
seed: 0
max_steps: 100                 # optimizer updates

model:                         # `type: python` with `entry: module:callable` trains a model of your own
  type: gpt
  n_layers: 2
  d_model: 128
  n_heads: 4
  vocab_size: 256

dataset:                       # or jsonl, tokens; `type: python` with `entry: module:callable` reads your own
  type: text
  path: "python:stdlib"        # a file, a folder, or Python's own source text
  seq_len: 128

# evaluation: {every: 50, batches: 10, fraction: 1%}   # the loss over the text's end, held out of training

training:
  global_batch_size: 16        # samples per step, over all workers
  micro_batch_size: 4          # samples per worker and pass; the passes per step follow from it
  max_grad_norm: 1.0
  precision: fp32              # fp32, bf16-mixed, fp16-mixed or bf16
  optimizer: {name: adamw, lr: 1e-3}
  scheduler: {name: cosine, warmup_steps: 10}

# strategy: {dp_shard: 2}      # divide parameters and moments among 2 workers; tp and pp are there too

cluster:
  nodes: 1
  workers_per_node: 2          # one per accelerator
  device: auto                 # auto, cpu or cuda

tiers:                         # places for checkpoints, fastest first; `tiers: []` trains without any
  - {type: memory, every: 1}   # in memory, every step: survives a crash of a worker
  - {type: disk, every: auto, keep: 3}   # on disk, as often as it costs nothing: survives a power cut
# - {type: object, url: "s3://bucket/my-run", every: auto}   # in a bucket: survives the loss of the cluster

checkpoint:
  max_overhead: 1%             # most time of a step that checkpointing may cost
"""
