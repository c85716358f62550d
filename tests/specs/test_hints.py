"""Unknown keys and values: the advice names a key that exists, whatever tool the spelling comes from."""

import re

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.checks.hints import for_key, spellings
from dtrain.specs.checks.outline import keys_of, places
from dtrain.specs.secrets import is_secret


def known_paths() -> set[str]:
    found = set()
    for place in places().values():
        prefix = f"{place.title}." if place.names else ""
        found |= {prefix + key for key in keys_of(place)}
    return found


def test_every_target_of_the_table_exists() -> None:
    assert set(spellings().values()) <= known_paths()


def test_no_spelling_of_the_table_is_a_key_of_dtrain_in_that_place() -> None:
    known = known_paths()
    for spelling, target in spellings().items():
        block = target.rpartition(".")[0]
        assert f"{block}.{spelling}" not in known, spelling


OTHER_TOOLS = {
    "learning_rate": "training.optimizer.lr",
    "per_device_train_batch_size": "training.micro_batch_size",
    "local_batch_size": "training.micro_batch_size",
    "seq_length": "dataset.seq_len",
    "max_seq_len": "dataset.seq_len",
    "sequence_len": "dataset.seq_len",
    "sequence_length": "dataset.seq_len",
    "cutoff_len": "dataset.seq_len",
    "train_iters": "max_steps",
    "steps": "max_steps",
    "max_norm": "training.max_grad_norm",
    "clip_grad": "training.max_grad_norm",
    "gradient_clipping": "training.max_grad_norm",
    "lr_scheduler": "training.scheduler",
    "lr_scheduler_type": "training.scheduler.name",
    "lr_warmup_steps": "training.scheduler.warmup_steps",
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "nproc_per_node": "cluster.workers_per_node",
    "gpus_per_node": "cluster.workers_per_node",
    "num_workers": "cluster.workers_per_node",
    "bf16": "bf16-mixed",
    "dtype": "training.precision",
    "save_steps": "tiers[].every",
    "save_interval": "tiers[].every",
    "save_total_limit": "tiers[].keep",
    "keep_last": "tiers[].keep",
    "keep_latest_k": "tiers[].keep",
    "max_to_keep": "tiers[].keep",
    "keep_period": "tiers[].keep_every",
    "async_save": "tiers[].when_slow",
    "bucket": "`tiers[].url` (with the folder in it",
    "s3_uri": "tiers[].url",
    "endpoint_url": "tiers[].endpoint",
    "aws_region": "tiers[].region",
    "s3_prefix": "tiers[].url",
    "aws_secret_access_key": "remove it: credentials come from the environment",
    "sas_token": "remove it: credentials come from the environment",
    "nan_policy": "checkpoint.non_finite",
    "resume_from_checkpoint": "dtrain resume",
    "out_dir": "output_dir",
    "dump_folder": "output_dir",
    "dp": "strategy.dp_replicate",
    "dp_size": "strategy.dp_replicate",
    "tp_size": "strategy.tp",
    "pp_size": "strategy.pp",
    "data_parallel_size": "strategy.dp_replicate",
    "gradient_checkpointing": "`strategy.activation_checkpointing` (`full` or `none`)",
    "virtual_pipeline_model_parallel_size": "strategy.pp_stages_per_rank",
    "compile": "block `strategy`",
    "torch_compile": "strategy.compile",
    "tensor_parallel_degree": "strategy.tp",
    "parallelism": "strategy",
    "data": "dataset",
    "datasets": "dataset",
    "n_layer": "model.n_layers",
    "num_layers": "model.n_layers",
    "num_hidden_layers": "model.n_layers",
    "hidden_size": "model.d_model",
    "n_embd": "model.d_model",
    "num_attention_heads": "model.n_heads",
    "n_head": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.d_ff",
    "tie_word_embeddings": "model.tie_embeddings",
    "gradient_accumulation_steps": "accumulation is derived",
    "num_train_epochs": "max_steps",
    "num-epochs": "max_steps",
    "Learning-Rate": "training.optimizer.lr",
    "optimizer": "block `training`",
    "lr": "block `training.optimizer`",
    "micro_batch_size": "block `training`",
    "warmup_steps": "block `training.scheduler`",
    "mtbf": "block `cluster`",
    "every": "block `tiers[]`",
    "max_step": "did you mean `max_steps`",
    "output-dir": "did you mean `output_dir`",
    "chekpoint": "did you mean `checkpoint`",
    "workers_pr_node": "did you mean `cluster.workers_per_node`",
    "training.optimizer.lr": "`lr` in the block `training.optimizer`",
    "zzz": "keys here: name, output_dir, seed",
}


@pytest.mark.parametrize("key", OTHER_TOOLS)
def test_an_unknown_key_at_the_top_is_advised_on(desk: Desk, key: str) -> None:
    problem = desk.problem(f"{key}: 3\n{BASE}")
    assert problem.message == "unknown key"
    assert (problem.key, problem.line, problem.column) == (key, 1, 1)
    assert problem.value == ("…" if is_secret(key) else "3")
    assert OTHER_TOOLS[key] in (problem.hint or "")


@pytest.mark.parametrize("key", sorted({*spellings()} | {"grad_accum_steps", "epochs", "resume", "recompute"}))
def test_every_spelling_of_the_table_is_advised_on_everywhere(key: str) -> None:
    for place in places().values():
        if key not in keys_of(place):
            advice = for_key((*place.names, key), None) or ""
            assert re.search(r"`[a-z_.\[\]]+`|remove it", advice), (place.title, key, advice)
            assert "keys here" not in advice, (place.title, key)


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("    lr: 1e-3\n", "    lr: 1e-3\n    momentum: 0.9\n", "training.optimizer.momentum",
         "`momentum` belongs to name `sgd`, not `adamw`"),
        ("n_heads: 4", 'n_heads: 4, entry: "a:b"', "model.entry", "`entry` belongs to type `python`, not `gpt`"),
        ("every: 1}", "every: 1, keep: 3}", "tiers[0].keep", "`keep` belongs to type `disk`, `object`, not `memory`"),
        ("n_heads: 4", "n_heads: 4, n_layer: 3", "model.n_layer", "`model.n_layers`"),
        ("keep: 3", "keep: 3, save_total_limit: 3", "tiers[1].save_total_limit", "`tiers[].keep`"),
        ("  micro_batch_size: 4\n", "  micro_batch_size: 4\n  lr: 3\n", "training.lr", "block `training.optimizer`"),
        ("  micro_batch_size: 4\n", "  micro_batch_size: 4\n  max_steps: 3\n", "training.max_steps", "the top level"),
        ("nodes: 2, workers_per_node: 2", "nodes: 2, workers_per_node: 2, workers: 2", "cluster.workers",
         "did you mean `workers_per_node`"),
        ("warmup_steps: 5", "warmup_steps: 5, warmup_step: 5", "training.scheduler.warmup_step",
         "did you mean `warmup_steps`"),
        ("device: cpu", "channels: {storage: {bandwith: auto}}", "cluster.channels.storage.bandwith",
         "did you mean `bandwidth`"),
    ],
)  # fmt: skip
def test_row_110_an_unknown_key_in_a_block_is_advised_on(desk: Desk, old: str, new: str, key: str, hint: str) -> None:
    problem = desk.problem(changed((old, new)))
    assert (problem.key, problem.message) == (key, "unknown key")
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("name: adamw", "name: adam", "training.optimizer.name", "`adamw`"),
        ("name: adamw", "name: AdamW", "training.optimizer.name", "`adamw`"),
        ("name: cosine,", "name: cosine_with_warmup,", "training.scheduler.name", "`cosine` (the warm-up is"),
        ("name: cosine,", "name: cosin,", "training.scheduler.name", "did you mean `cosine`"),
        ("device: cpu", "device: gpu", "cluster.device", "`cuda`"),
        ("{type: gpt,", "{type: llama,", "model.type", "`gpt`"),
        ("{type: memory,", "{type: ram,", "tiers[0].type", "`memory`"),
        ("{type: memory,", "{type: memroy,", "tiers[0].type", "did you mean `memory`"),
        ("training:\n", "training:\n  precision: bf16_mixed\n", "training.precision", "`bf16-mixed`"),
        ("training:\n", "training:\n  precision: float32\n", "training.precision", "`fp32`"),
        (
            "name: t\n",
            "name: t\nstrategy: {activation_checkpointing: true}\n",
            "strategy.activation_checkpointing",
            "`full`",
        ),
        ("name: t\n", "name: t\nstrategy: {pp: 2, pp_schedule: afab}\n", "strategy.pp_schedule", "`gpipe`"),
    ],
)
def test_a_value_of_another_tool_is_advised_on(desk: Desk, old: str, new: str, key: str, hint: str) -> None:
    problem = desk.problem(changed((old, new)))
    assert problem.key == key
    assert hint in (problem.hint or "")
