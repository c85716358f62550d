"""What a person probably meant: other tools' names for dtrain's keys and values, and the nearest spelling.

The tables are a guide for moving a spec over; nothing in them is accepted silently.
"""

from __future__ import annotations

from difflib import get_close_matches

from ..secrets import ENVIRONMENT, is_secret
from ..text.tree import KeyPath
from .outline import Place, keys_of, names_of, places, title

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "name": ("run_name", "job_name", "experiment_name", "exp_name", "run_id"),
    "output_dir": (
        "out_dir", "outdir", "output_path", "dump_folder", "dump_dir", "save_dir", "save_folder", "run_dir",
        "work_dir", "logdir", "log_dir", "default_root_dir", "checkpoint_dir", "ckpt_dir", "checkpoints_path",
    ),
    "seed": ("random_seed", "global_seed", "manual_seed", "data_seed"),
    "max_steps": (
        "steps", "train_iters", "train_steps", "training_steps", "num_steps", "num_train_steps", "max_iters",
        "max_iterations", "total_steps", "num_iterations", "max_train_steps", "iterations",
    ),
    "model": ("architecture", "network"),
    "model.type": ("model_type", "arch", "model_name"),
    "model.n_layers": ("n_layer", "num_layers", "num_hidden_layers", "layers", "depth", "nlayers"),
    "model.d_model": ("hidden_size", "n_embd", "dim", "embed_dim", "embedding_dim", "emb_dim", "model_dim",
                      "n_embed", "width", "hidden_dim"),
    "model.n_heads": ("num_attention_heads", "n_head", "num_heads", "heads", "attention_heads"),
    "model.n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_query_groups", "num_query_groups", "kv_heads"),
    "model.d_ff": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "mlp_dim", "mlp_hidden_size", "d_mlp",
                   "feed_forward_dim"),
    "model.vocab_size": ("padded_vocab_size", "n_vocab", "vocabulary_size", "vocab"),
    "model.activation": ("hidden_act", "act_fn", "activation_function", "mlp_activation"),
    "model.dropout": ("hidden_dropout", "resid_pdrop", "dropout_p", "residual_dropout", "dropout_rate"),
    "model.tie_embeddings": ("tie_word_embeddings", "tie_weights", "weight_tying", "tied_embeddings",
                             "share_embeddings_and_output_weights"),
    "model.rope_theta": ("rope_base", "rotary_base", "rotary_emb_base"),
    "model.entry": ("_target_", "class_path", "callable", "factory", "entrypoint", "entry_point"),
    "model.kwargs": ("init_args", "args", "params", "arguments"),
    "model.like": ("shape", "describe", "description", "sizes", "size_hint"),
    "dataset": ("data", "datasets", "train_loader", "train_dataset", "dataloader", "train_data", "data_module"),
    "dataset.path": ("data_path", "dataset_path", "data_dir", "train_file", "data_files", "dataset_dir", "root"),
    "dataset.tokenizer": ("tokenizer_path", "tokenizer_name", "tokenizer_type", "tokenizer_model"),
    "dataset.field": ("text_column", "text_field", "text_key", "content_key", "json_key", "column", "field_name"),
    "dataset.seq_len": (
        "seq_length", "sequence_length", "sequence_len", "max_seq_len", "max_seq_length", "cutoff_len",
        "block_size", "context_length", "context_len", "max_length", "n_ctx", "max_position_embeddings", "n_positions",
    ),
    "evaluation": ("eval", "validation", "val", "validator", "evaluate", "evaluator", "validate", "evaluation_config"),
    "evaluation.every": (
        "eval_steps", "eval_interval", "eval_every", "eval_freq", "val_interval", "val_check_interval", "freq",
        "evaluation_interval", "eval_step", "validation_interval", "val_every", "check_val_every_n_steps",
    ),
    "evaluation.batches": (
        "eval_iters", "limit_val_batches", "eval_batches", "val_steps", "max_eval_batches", "val_batches",
        "validation_steps", "eval_max_batches", "num_eval_batches",
    ),
    "evaluation.fraction": ("val_split", "test_size", "validation_split", "val_fraction", "eval_fraction", "held_out",
                            "validation_fraction", "val_ratio", "holdout", "split"),
    "evaluation.dataset": ("eval_dataset", "val_dataset", "validation_dataset", "val_data", "eval_data", "val_loader",
                           "validation_data", "eval_dataloader", "val_dataloader"),
    "training": ("train", "trainer", "training_args", "training_arguments", "hyperparameters"),
    "training.global_batch_size": ("batch_size", "train_batch_size", "global_train_batch_size", "total_batch_size",
                                   "effective_batch_size"),
    "training.micro_batch_size": (
        "per_device_train_batch_size", "local_batch_size", "device_train_microbatch_size", "microbatch_size",
        "train_micro_batch_size_per_gpu", "per_device_batch_size", "per_gpu_batch_size", "device_batch_size", "mbs",
    ),
    "training.max_grad_norm": (
        "max_norm", "clip_grad", "clip_grad_norm", "grad_clip", "gradient_clipping", "gradient_clip_val",
        "grad_norm_clip", "clip", "gradient_clip", "clip_gradient",
    ),
    "training.precision": ("dtype", "torch_dtype", "mixed_precision", "param_dtype", "amp", "autocast",
                           "bf16", "fp16", "fp32", "bfloat16"),
    "training.optimizer": ("optim", "optimizer_config", "opt"),
    "training.optimizer.name": ("optimizer_type", "optimizer_name", "optim_type"),
    "training.optimizer.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr", "lr_max", "initial_lr"),
    "training.optimizer.weight_decay": ("wd", "decay", "l2"),
    "training.optimizer.betas": ("beta", "beta1", "beta2", "adam_beta1", "adam_beta2", "adam_betas"),
    "training.optimizer.eps": ("epsilon", "adam_epsilon", "adam_eps"),
    "training.scheduler": ("lr_scheduler", "lr_schedule", "schedule", "lr_scheduler_config", "sched"),
    "training.scheduler.name": ("lr_scheduler_type", "lr_decay_style", "scheduler_type", "decay_type"),
    "training.scheduler.warmup_steps": ("lr_warmup_steps", "warmup", "warmup_iters", "lr_warmup_iters", "warm_up_steps",
                                        "num_warmup_steps"),
    "training.scheduler.min_lr_ratio": ("min_lr_factor", "lr_min_ratio", "min_lr_rate"),
    "strategy": ("parallelism", "parallel", "distributed", "mesh", "parallel_dims", "parallelism_config"),
    "strategy.dp_replicate": ("dp", "dp_size", "data_parallel", "data_parallel_size", "data_parallel_degree", "ddp",
                              "data_parallel_replicate_degree", "dp_replicate_size"),
    "strategy.dp_shard": ("fsdp", "fsdp_size", "data_parallel_shard_degree", "dp_shard_size", "zero_stage"),
    "strategy.tp": ("tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree",
                    "tensor_model_parallel_size"),
    "strategy.pp": ("pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree",
                    "pipeline_model_parallel_size"),
    "strategy.pp_schedule": ("pipeline_schedule", "pipeline_parallel_schedule", "pp_engine", "pipeline_engine"),
    "strategy.pp_stages_per_rank": (
        "virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size", "num_model_chunks", "vpp",
        "interleaved_stages", "virtual_pp_size",
    ),
    "strategy.activation_checkpointing": (
        "gradient_checkpointing", "activation_checkpoint", "recompute", "recompute_granularity",
        "activation_checkpoint_mode", "recompute_activations",
    ),
    "strategy.compile": ("torch_compile", "compile_model"),
    "cluster": ("resources", "launcher", "launch", "infra"),
    "cluster.nodes": ("nnodes", "num_nodes", "n_nodes", "num_machines", "node_count"),
    "cluster.workers_per_node": (
        "nproc_per_node", "gpus_per_node", "num_gpus", "n_gpus", "num_processes", "ngpu", "ngpus", "gpus", "devices",
        "num_workers", "processes_per_node", "ntasks_per_node", "num_gpus_per_node",
    ),
    "cluster.device": ("device_type", "backend"),
    "cluster.accelerator": ("gpu", "gpu_type", "accelerators"),
    "cluster.hardware": ("hw", "device_figures", "machine"),
    "cluster.hardware.flops": ("tflops", "peak_flops", "flops_per_second", "gpu_flops", "flop_per_s"),
    "cluster.hardware.memory_bandwidth": ("hbm_bandwidth", "mem_bandwidth", "gpu_memory_bandwidth"),
    "cluster.hardware.node_bandwidth": ("nvlink_bandwidth", "intra_node_bandwidth", "nvlink"),
    "cluster.hardware.network_bandwidth": ("inter_node_bandwidth", "ib_bandwidth", "nic_bandwidth", "net_bandwidth"),
    "cluster.hardware.disk_bandwidth": ("write_bandwidth", "io_bandwidth", "filesystem_bandwidth"),
    "cluster.hardware.object_bandwidth": ("s3_bandwidth", "upload_bandwidth", "bucket_bandwidth"),
    "cluster.hardware.device_memory": ("gpu_memory", "hbm", "vram", "gpu_mem"),
    "cluster.hardware.host_memory": ("node_memory", "cpu_memory", "ram"),
    "cluster.hardware.restart_time": ("restart_s", "restart_seconds", "recovery_time"),
    "cluster.rendezvous": ("rdzv_endpoint", "rdzv_backend", "master_addr", "master_port", "init_method"),
    "cluster.max_restarts": ("restarts", "max_retries", "max_failures", "retries"),
    "cluster.heartbeat_timeout": ("timeout", "hang_timeout", "heartbeat", "watchdog_timeout", "monitor_timeout"),
    "cluster.startup_timeout": ("start_timeout", "init_timeout", "startup", "initialization_timeout", "warmup_timeout"),
    "cluster.shutdown_timeout": ("grace_period", "kill_timeout", "grace", "termination_grace_period"),
    "tiers": ("checkpoints", "checkpointing", "storage", "checkpointer", "save"),
    "tiers[].every": ("save_steps", "save_interval", "checkpoint_interval", "save_every", "ckpt_interval", "interval",
                      "save_freq", "checkpoint_every", "every_n_steps", "every_n_train_steps"),
    "tiers[].keep": ("save_total_limit", "keep_last", "keep_latest_k", "keep_last_n", "save_num_checkpoints_to_keep",
                     "max_to_keep", "total_limit", "save_top_k", "keep_last_k"),
    "tiers[].keep_every": ("keep_period", "keep_every_n", "keep_every_n_steps", "keep_interval", "archive_every",
                           "keep_checkpoint_every_n_steps", "milestone_every", "permanent_interval"),
    "tiers[].replicas": ("copies", "replication", "replication_factor", "replica_count", "num_replicas", "redundancy"),
    "cluster.nodes_per_zone": ("nodes_per_rack", "rack_size", "zone_size", "zones", "racks"),
    "tiers[].when_slow": ("on_slow", "when_busy", "async_save", "async_mode", "blocking", "backpressure"),
    "tiers[].on_failure": ("on_error", "on_save_error", "ignore_errors", "ignore_failures", "fail_on_error",
                           "raise_on_error", "continue_on_failure"),
    "tiers[].commit": ("commit_mode", "atomic", "atomic_rename"),
    "tiers[].path": ("checkpoint_folder", "save_folder_path"),
    "tiers[].url": (
        "bucket", "bucket_name", "container", "uri", "s3_uri", "s3_url", "s3_path", "s3_bucket", "gcs_path",
        "gcs_bucket", "gs_path", "remote_path", "remote_url", "remote_dir", "remote_folder", "cloud_path", "upload_to",
        "checkpoint_s3_uri", "s3_checkpoint_dir",
    ),
    "tiers[].endpoint": ("endpoint_url", "s3_endpoint", "s3_endpoint_url", "aws_endpoint", "aws_endpoint_url",
                         "endpoint_override"),
    "tiers[].region": ("aws_region", "region_name", "s3_region", "aws_default_region"),
    "checkpoint.max_overhead": ("overhead", "overhead_budget"),
    "checkpoint.non_finite": ("nan_policy", "on_nan", "check_nan", "check_for_nan", "detect_nan"),
}  # fmt: skip

_REMARKS: dict[str, str] = {
    "gradient_accumulation_steps": "remove it: accumulation is derived, "
    "global_batch_size / (micro_batch_size * dp_replicate * dp_shard)",
    "num_epochs": "the length of a run is given in optimizer updates: `max_steps`",
    "max_tokens": "the length of a run is given in optimizer updates: `max_steps`",
    "max_duration": "the length of a run is given in optimizer updates: `max_steps`",
    "resume_from_checkpoint": "remove it: `dtrain resume` goes on from the newest whole step of the run",
    "do_eval": "give a block `evaluation: {every: 100}`",
    "per_device_eval_batch_size": "remove it: evaluation takes batches of `training.micro_batch_size` samples",
    "warmup_ratio": "give a number of steps: `training.scheduler.warmup_steps`",
    "min_lr": "give it as a fraction of the peak: `training.scheduler.min_lr_ratio`",
    "logging_steps": "remove it: every step is written to metrics.jsonl",
    "rank": "remove it: ranks come from the launcher, one spec serves all nodes",
    "version": "remove it: a spec has no version key",
    "secret_key": f"remove it: credentials come from the environment ({ENVIRONMENT}), never from a spec",
    "prefix": "give it with the bucket: `tiers[].url`, like `s3://bucket/folder`",
}
_SAME_REMARK: dict[str, tuple[str, ...]] = {
    "gradient_accumulation_steps": ("grad_accum_steps", "accumulate_grad_batches", "gradient_accumulation",
                                    "accumulation_steps", "grad_accumulation_steps", "grad_acc_steps"),
    "num_epochs": ("epochs", "max_epochs", "num_train_epochs"),
    "max_tokens": ("train_tokens", "total_tokens", "global_batch_tokens"),
    "resume_from_checkpoint": ("resume", "autoresume", "load_path", "resume_from", "auto_resume"),
    "do_eval": ("evaluation_strategy", "eval_strategy", "do_validation"),
    "per_device_eval_batch_size": ("eval_batch_size", "val_batch_size", "eval_micro_batch_size"),
    "warmup_ratio": ("warmup_fraction",),
    "logging_steps": ("log_interval", "log_every_n_steps", "log_freq", "log_every"),
    "rank": ("node_rank", "local_rank", "world_size"),
    "secret_key": (
        "access_key", "access_key_id", "secret_access_key", "aws_access_key_id", "aws_secret_access_key",
        "session_token", "aws_session_token", "aws_profile", "credentials", "credentials_file", "service_account",
        "service_account_key", "google_application_credentials", "account_key", "account_name", "sas_token",
        "api_key", "token", "password",
    ),
    "prefix": ("s3_prefix", "key_prefix", "bucket_prefix"),
    "min_lr": ("lr_min", "eta_min", "end_lr"),
}  # fmt: skip

_EXTRA: dict[str, str] = {
    "bf16": "write `precision: bf16-mixed`",
    "bfloat16": "write `precision: bf16-mixed`",
    "bucket": "with the folder in it: `s3://bucket/folder`",
    "gradient_checkpointing": "`full` or `none`",
    "recompute": "`full` or `none`",
    "save_steps": "one per tier",
    "save_interval": "one per tier",
    "num_workers": "worker processes; data is loaded inside them",
    "beta1": "a list of two, like [0.9, 0.95]",
    "beta2": "a list of two, like [0.9, 0.95]",
    "batch_size": "over all ranks; `training.micro_batch_size` is that of one rank and pass",
}

_KINDS_OF_DATA = {
    **dict.fromkeys(("txt", "file", "files", "plain", "raw"), "text"),
    **dict.fromkeys(("json", "ndjson", "jsonlines", "json_lines"), "jsonl"),
    **dict.fromkeys(("bin", "binary", "mmap", "memmap", "tokenized", "token", "nanogpt", "token_ids"), "tokens"),
}
_VALUES: dict[str, dict[str, str]] = {
    "training.optimizer.name": {
        **dict.fromkeys(
            ("adam", "adamw_torch", "adamw_torch_fused", "fused_adam", "torch.optim.adamw", "adamw_fused"), "adamw"
        ),
        **dict.fromkeys(("momentum", "torch.optim.sgd"), "sgd"),
    },
    "training.precision": {
        **dict.fromkeys(("32", "float32", "fp32-true", "32-true", "float", "no", "full"), "fp32"),
        **dict.fromkeys(("amp_bf16", "mixed", "bf16_mixed", "true"), "bf16-mixed"),
        **dict.fromkeys(("amp_fp16", "16-mixed", "fp16_mixed"), "fp16-mixed"),
        **dict.fromkeys(("bf16-true", "bfloat16"), "bf16"),
    },
    "training.scheduler.name": {
        **dict.fromkeys(("constant_with_warmup", "none", "const"), "constant"),
        **dict.fromkeys(("linear_with_warmup", "linear_decay", "lineardecay"), "linear"),
        **dict.fromkeys(
            ("cosine_with_warmup", "cosine_with_min_lr", "cosine_annealing", "warmup_cosine", "cosineannealinglr",
             "cosinedecay", "cosine_with_restarts"), "cosine"),
    },
    "strategy.pp_schedule": {
        **dict.fromkeys(("interleaved", "interleaved1f1b", "interleaved_1f1b", "looped"), "interleaved-1f1b"),
        **dict.fromkeys(("afab", "all_forward_all_backward", "schedulegpipe"), "gpipe"),
        **dict.fromkeys(("pipedream", "pipedream-flush", "schedule1f1b", "one_forward_one_backward"), "1f1b"),
    },
    "strategy.activation_checkpointing": {
        **dict.fromkeys(("true", "yes", "on", "block", "layer", "all"), "full"),
        **dict.fromkeys(("false", "no", "off"), "none"),
    },
    "model.type": dict.fromkeys(("llama", "gpt2", "transformer", "decoder", "gpt-2", "nanogpt"), "gpt"),
    "model.activation": {"silu": "swiglu", "swish": "swiglu", "gelu_new": "gelu", "gelu_tanh": "gelu"},
    "dataset.type": _KINDS_OF_DATA,
    "evaluation.dataset.type": _KINDS_OF_DATA,
    "dataset.tokenizer": dict.fromkeys(("byte", "char", "utf8", "utf-8", "bytelevel"), "bytes"),
    "cluster.device": dict.fromkeys(("gpu", "nvidia", "cuda:0"), "cuda"),
    "tiers.type": {
        **dict.fromkeys(("ram", "mem", "shm", "tmpfs", "host", "dev/shm"), "memory"),
        **dict.fromkeys(("partner", "buddy", "replica", "replicated", "neighbor", "remote_memory"), "peer"),
        **dict.fromkeys(
            ("s3", "gcs", "gs", "az", "azure", "blob", "bucket", "cloud", "remote", "minio", "object_store", "r2"),
            "object",
        ),
        **dict.fromkeys(("local", "ssd", "nvme", "file", "fs", "filesystem", "folder", "nfs"), "disk"),
    },
    "tiers.when_slow": {
        **dict.fromkeys(("drop", "leave_out", "async", "false", "no"), "skip"),
        **dict.fromkeys(("block", "sync", "stall", "true", "yes"), "wait"),
    },
    "tiers.on_failure": {
        **dict.fromkeys(("ignore", "warn", "log", "skip", "retry"), "continue"),
        **dict.fromkeys(("raise", "abort", "fail", "error", "exit"), "stop"),
    },
    "tiers.commit": {**dict.fromkeys(("atomic", "move"), "rename"), **dict.fromkeys(("marker", "last"), "manifest")},
    "checkpoint.non_finite": {
        **dict.fromkeys(("raise", "abort", "fail", "error"), "stop"),
        **dict.fromkeys(("ignore", "continue", "warn"), "skip"),
    },
}  # fmt: skip
_VALUE_NOTES = {"cosine_with_warmup": "the warm-up is `warmup_steps`", "adam": "decoupled weight decay"}

_GENERIC = {"type", "name", "path", "entry", "kwargs", "interface"}
"""Keys that so many blocks have that naming one of them would be a guess."""

_TARGETS = {spelling: key for key, spellings in _SPELLINGS.items() for spelling in spellings}
_REMARK_OF = {spelling: key for key, spellings in _SAME_REMARK.items() for spelling in spellings}


def _folded(key: str) -> str:
    return key.strip().lower().replace("-", "_").replace(" ", "_")


def _from_table(key: str) -> str | None:
    remark = _REMARKS.get(_REMARK_OF.get(key, key))
    if remark:
        return remark
    if key not in _TARGETS:
        return None
    extra = f" ({_EXTRA[key]})" if key in _EXTRA else ""
    return f"dtrain calls it `{_TARGETS[key]}`{extra}"


def _dotted(key: str) -> str | None:
    names = tuple(key.split("."))
    if len(names) < 2 or names[-1] not in keys_of(places().get(names[:-1], places()[()])):
        return None
    return f"keys with dots are for the command line; here write `{names[-1]}` in the block `{title(names[:-1])}`"


def _other_variant(place: Place, key: str, tag: str | None) -> str | None:
    owners = keys_of(place).get(key, [])
    if not owners or place.tag is None:
        return None
    chosen = f", not `{tag}`" if tag else ""
    return f"`{key}` belongs to {place.tag} `{'`, `'.join(owners)}`{chosen}"


def _elsewhere(place: Place, key: str) -> str | None:
    """Say in which other blocks a key of exactly this name exists."""
    if key in _GENERIC:
        return None
    blocks = [other.title for other in places().values() if other is not place and key in keys_of(other)]
    if not blocks:
        return None
    where = " and ".join("the top level" if not block else f"block `{block}`" for block in blocks)
    return f"this key exists, but in {where}"


def _nearest(place: Place, key: str, tag: str | None) -> str | None:
    model = place.variants.get(tag or "")
    own = list(model.model_fields) if model else list(keys_of(place))
    close = get_close_matches(key, own, 1, 0.7) or [name for name in own if name.startswith(key + "_")]
    if close:
        return f"did you mean `{close[0]}`?"
    everywhere = {name: other for other in places().values() for name in keys_of(other) if name not in _GENERIC}
    close = get_close_matches(key, list(everywhere), 1, 0.8)
    if close:
        block = everywhere[close[0]].title
        return f"did you mean `{block + '.' if block else ''}{close[0]}`?"
    return f"keys here: {', '.join(own)}"


def for_key(path: KeyPath, tag: str | None) -> str | None:
    """Advise on an unknown key; `tag` is the type (or name) chosen in its block."""
    names = names_of(path)
    place = places().get(names[:-1])
    if place is None:
        return None
    key = _folded(names[-1])
    if is_secret(key):
        return _REMARKS["secret_key"]
    return (
        _dotted(key)
        or _other_variant(place, key, tag)
        or (_from_table(key) if key in _REMARKS or title((*names[:-1], key)) != _TARGETS.get(key) else None)
        or _elsewhere(place, key)
        or _nearest(place, key, tag)
    )


def for_value(path: KeyPath, text: str, choices: tuple[str, ...]) -> str | None:
    """Advise on a value that is none of the choices."""
    folded = text.strip().lower()
    meant = _VALUES.get(title(names_of(path)), {}).get(folded)
    if meant is None:
        close = get_close_matches(folded, choices, 1, 0.6)
        return f"did you mean `{close[0]}`?" if close else None
    note = f" ({_VALUE_NOTES[folded]})" if folded in _VALUE_NOTES else ""
    return f"dtrain calls it `{meant}`{note}"


def spellings() -> dict[str, str]:
    """Return the whole table: another tool's key → dtrain's key path."""
    return dict(_TARGETS)
