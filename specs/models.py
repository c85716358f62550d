"""The typed job spec: one model per block, each key with its meaning and unit.

Only what dtrain can do today is in here; what later versions will do is refused by name (see `support`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .block import Block
from .datasets import ENTRY_PATTERN, Dataset
from .nodes import NodeCount, Nodes, Shape, shards_among, usable
from .places import DiskTier, MemoryTier, ObjectTier, PeerTier, SlowTier, Tier
from .shapes import Decoder, DecoderShape, DiffusionShape, EncoderShape
from .units import Bandwidth, ByteSize, Flops, Fraction, PositiveInt, Seconds, WholeNumber

HELD_OUT = 0.01
"""Part of a text that evaluation holds out unless the spec says another."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
"""1 to 65535."""
RENDEZVOUS_PATTERN = rf"^(auto|slurm|([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):{_PORT})$"
INTERFACE_PATTERN = r"^[^\s/,:]{1,15}$"


class GptModel(Decoder):
    """A llama-style decoder built into dtrain: RMSNorm, rotary positions, SwiGLU or GELU, no biases."""

    type: Literal["gpt"]
    vocab_size: PositiveInt = 256
    """Tokens in the vocabulary; the bytes tokenizer needs 256."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary position frequencies."""


class PythonModel(Block):
    """Your own module: `entry(**kwargs)` returns an nn.Module whose forward returns the mean loss."""

    type: Literal["python"]
    entry: Annotated[str, Field(pattern=ENTRY_PATTERN)]
    """`module:callable`, imported from the working directory, the spec's folder or what is installed."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the callable."""
    plan: Annotated[str, Field(pattern=ENTRY_PATTERN)] | None = None
    """`module:callable` that is given the model and says how `tp` and `pp` cut it; see docs/strategies.md."""
    like: DecoderShape | EncoderShape | DiffusionShape | None = Field(default=None, discriminator="family")
    """What the plan takes the model for: its family and sizes. The code alone says what is trained."""


class Evaluation(Block):
    """The loss over data that is never trained on: forward passes only, between two steps."""

    every: PositiveInt
    """Steps between two evaluations; the last step is evaluated, too."""
    batches: PositiveInt = 20
    """Micro-batches of one evaluation, over all ranks; the same samples each time."""
    fraction: Fraction | None = None
    """Part of the text that is held out of training: its end. Default 1% where there is no `dataset` here."""
    dataset: Dataset | None = Field(default=None, discriminator="type")
    """Data of its own to evaluate on, instead of a held-out part; all of the training data is trained on then."""

    @property
    def held_out(self) -> float:
        """Part of the training data that is held out; 0: it has data of its own."""
        if self.dataset is not None:
            return 0.0
        return HELD_OUT if self.fraction is None else self.fraction


class AdamW(Block):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101)."""

    name: Literal["adamw"]
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices; vectors (norms, biases) are not decayed."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]  # noqa: RUF012 (pydantic copies defaults)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""


class Sgd(Block):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty of matrices; vectors are not decayed."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum factor; 0 keeps no momentum buffer."""


class Scheduler(Block):
    """Learning rate over the steps: linear warm-up, then the named curve."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Curve after the warm-up."""
    warmup_steps: WholeNumber = 0
    """Steps of linear warm-up from 0 to the peak."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step, as a fraction of the peak (linear and cosine)."""


class Training(Block):
    """Batch, precision, optimizer."""

    global_batch_size: PositiveInt
    """Samples per step, over all ranks."""
    micro_batch_size: PositiveInt
    """Samples per rank and pass; the number of passes per step is derived."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the global gradient norm to this; null: no clipping."""
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"] = "fp32"
    """fp32, or bf16 or fp16 autocast over fp32 weights and moments; fp16 with a scaled loss. bf16: weights and
    gradients in bf16, the update on fp32 copies of the weights with fp32 moments."""
    optimizer: Annotated[AdamW | Sgd, Field(discriminator="name")]
    """The optimizer and its figures."""
    scheduler: Scheduler = Scheduler()
    """Learning rate over the steps."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an average of the trained weights: after each update decay * average + (1 - decay) * weight; `dtrain export
    --ema` writes it."""


class Strategy(Block):
    """Parallel degrees; their product is the world size. Ranks next to each other differ in tp first, in pp last."""

    dp_replicate: PositiveInt | None = None
    """Replicas of the model, or of its shards; default: all workers that the other degrees leave."""
    dp_shard: PositiveInt = 1
    """Workers that divide every parameter, its gradient and its moments among them (FSDP2). With `nodes: MIN:MAX` at
    least so many where there are, else all: it follows the number of nodes."""
    tp: PositiveInt = 1
    """Workers that divide every matrix product among them (tensor parallel)."""
    pp: PositiveInt = 1
    """Workers that divide the layers among them (pipeline parallel)."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved-1f1b"] = "1f1b"
    """Order of the passes in a pipeline."""
    pp_stages_per_rank: PositiveInt | None = None
    """Parts of the model that one worker of a pipeline holds; default: 1, or 2 with interleaved-1f1b."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: keep only the input of each layer and run its forward pass again in the backward pass."""
    compile: bool = False
    """Compile each layer (torch.compile); the first step takes longer."""

    def replicas(self, world: int) -> int:
        """dp_replicate, also where it is left out."""
        return self.dp_replicate or max(1, world // (self.dp_shard * self.tp * self.pp))


class Mtbf(Block):
    """Mean time between failures of one part."""

    process: Seconds = 24 * 3600.0
    """Of one worker process."""
    node: Seconds = 720 * 3600.0
    """Of one node."""


class ComputeChannel(Block):
    """Carries gradients."""

    interface: Annotated[str, Field(pattern=INTERFACE_PATTERN)] = "auto"
    """Network interface of every node; auto: the one by which the nodes reach each other's rendezvous."""


class StorageChannel(Block):
    """Carries checkpoints."""

    interface: Annotated[str, Field(pattern=INTERFACE_PATTERN)] = "auto"
    """Network interface of every node; auto: that of the compute channel."""
    bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Bytes per second and rank that a copy into the memory tier reaches; auto: taken from the device."""
    shared: Literal["auto"] | bool = "auto"
    """Whether gradients cross the same link as checkpoints; auto: they do where accelerators of several nodes are
    planned for (both leave a GPU over PCIe)."""


class Channels(Block):
    """The two channels of a node."""

    compute: ComputeChannel = ComputeChannel()
    """Gradients."""
    storage: StorageChannel = StorageChannel()
    """Checkpoints."""


class Hardware(Block):
    """What the plan takes one node and its links to reach in training; auto: by its table of devices."""

    flops: Literal["auto"] | Flops = "auto"
    """Floating point operations per second that one worker reaches in its passes (not the peak)."""
    memory_bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Traffic between one worker and its device's memory that the update reaches."""
    node_bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Rate of one worker to another of its node, in each direction."""
    network_bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Rate of one worker to another node, in each direction."""
    disk_bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Rate of one node's durable writes to the disk tier, while all nodes write, and of its reads."""
    object_bandwidth: Literal["auto"] | Bandwidth = "auto"
    """Rate of one node to and from the object store, while all nodes are at it."""
    device_memory: Literal["auto"] | ByteSize = "auto"
    """Memory of one accelerator."""
    host_memory: Literal["auto"] | ByteSize = "auto"
    """Main memory of one node."""
    restart_time: Seconds = 10.0
    """From a noticed fault to workers that are ready to read: rendezvous, imports, building the model."""


class Cluster(Block):
    """Where the job runs and how it is watched."""

    nodes: Nodes = NodeCount(1)
    """Number of nodes, or `MIN:MAX`: the run begins with MAX and goes on with as few as MIN."""
    workers_per_node: PositiveInt = 1
    """Worker processes per node (one per accelerator)."""
    nodes_per_zone: PositiveInt | None = None
    """Nodes, next to each other in rank, that a fault may take together (a rack, a switch): the peer tier copies to
    other zones; default: none is known."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto: cuda if this machine has it, else cpu."""
    accelerator: Literal["auto", "cpu", "a100", "h100", "h200", "b200", "mi300x"] = "auto"
    """The device the planner assumes; auto: the one of this machine."""
    hardware: Hardware = Hardware()
    """Figures of the hardware that replace the planner's."""
    rendezvous: Annotated[str, Field(pattern=RENDEZVOUS_PATTERN)] = "auto"
    """Where the nodes meet: `HOST:PORT`, an address of node 0; auto: as what starts the nodes says, if anything does
    (Slurm, torchrun's variables); slurm: as Slurm says, and nowhere else."""
    rejoin_timeout: Seconds = 600.0
    """Longest wait for a node that has not come yet, or that died and is to be started again."""
    last_call: Seconds = 30.0
    """With `nodes: MIN:MAX`: how long the first MIN wait for more before they begin."""
    on_node_loss: Literal["shrink", "wait"] = "shrink"
    """With `nodes: MIN:MAX`: go on with the nodes that are left, or wait `rejoin_timeout` for the lost one first."""
    max_restarts: WholeNumber = 3
    """Restarts in a row without a finished step between them that are allowed."""
    heartbeat_timeout: Seconds = 10.0
    """A rank without progress for this long (or ten times its longest pass, if that is more) is restarted."""
    startup_timeout: Seconds = 600.0
    """Before its first step a rank that shows no sign at all for this long (comes no further, takes no processor time,
    moves no bytes) is restarted, once those that start like it show none either; one that takes processor time and does
    nothing else, after five times as long."""
    shutdown_timeout: Seconds = 30.0
    """Time between a stop signal and the end by force."""
    mtbf: Mtbf = Mtbf()
    """Mean time between failures."""
    channels: Channels = Channels()
    """Compute and storage channel."""


class Checkpoint(Block):
    """What checkpointing may cost."""

    max_overhead: Fraction = 0.01
    """Upper limit of the time lost to checkpointing, as a fraction of the step time. Where `every` is auto a run that
    measures more stores less often; a number is kept and the excess told, up to four times this limit. A tier that
    training waits for (`when_slow`) is waited for whatever it takes."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A trained weight or the optimizer's state holds NaN or infinity, so it is not stored and the last good
    checkpoints stay: stop the run, or train on without checkpoints until all numbers are finite again."""


class Spec(Block):
    """A whole job."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    """Name of the run: letters, digits, `.`, `_`, `-`."""
    output_dir: Annotated[str, Field(min_length=1)]
    """Folder of this one run; relative paths are taken from the working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, data order and dropout."""
    max_steps: PositiveInt
    """Optimizer updates to make."""
    model: Annotated[GptModel | PythonModel, Field(discriminator="type")]
    """What is trained."""
    dataset: Annotated[Dataset, Field(discriminator="type")]
    """What it is trained on."""
    evaluation: Evaluation | None = None
    """The loss over data that is never trained on, every so many steps; default: none."""
    training: Training
    """Batch, precision, optimizer."""
    strategy: Strategy = Strategy()
    """Parallel degrees."""
    cluster: Cluster = Cluster()
    """Nodes, workers, device."""
    tiers: list[Tier] = [MemoryTier(type="memory"), DiskTier(type="disk")]  # noqa: RUF012 (pydantic copies defaults)
    """Places for checkpoints, fastest first; an empty list trains without checkpoints."""
    checkpoint: Checkpoint = Checkpoint()
    """What checkpointing may cost."""

    @property
    def world_size(self) -> int:
        """Workers over all nodes."""
        return self.cluster.nodes * self.cluster.workers_per_node

    @property
    def usable_nodes(self) -> tuple[int, ...]:
        """Numbers of nodes that the run can go on with, the smallest first; one unless it is elastic."""
        return tuple(usable(self.cluster.nodes, self.shape)) if self.cluster.nodes.elastic else (self.cluster.nodes,)

    @property
    def shape(self) -> Shape:
        """What must come out even for a number of nodes to be usable."""
        degrees, training = self.strategy, self.training
        return Shape(
            self.cluster.workers_per_node, degrees.tp, degrees.pp, degrees.pp_schedule,
            training.global_batch_size, training.micro_batch_size,
        )  # fmt: skip

    def at(self, nodes: int) -> Spec:
        """The spec with this number of nodes, not elastic any more; `dp_shard` is what it is with so many."""
        found: dict[str, Any] = {"cluster": self.cluster.model_copy(update={"nodes": NodeCount(nodes)})}
        if self.cluster.nodes.elastic:
            shard = shards_among(self.strategy.dp_shard, self.shape.data_parallel(nodes))
            found["strategy"] = self.strategy.model_copy(update={"dp_shard": shard})
        return self.model_copy(update=found)

    @property
    def largest(self) -> Spec:
        """The spec with the most nodes that can be used."""
        return self.at(max(self.usable_nodes)) if self.cluster.nodes.elastic else self

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one rank in one step (n)."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel)

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of ranks, that see different samples."""
        return self.strategy.replicas(self.world_size) * self.strategy.dp_shard

    def evaluates(self, step: int) -> bool:
        """Tell whether the state of `step` is evaluated."""
        return self.evaluation is not None and (step % self.evaluation.every == 0 or step == self.max_steps)

    @property
    def used_tiers(self) -> list[Tier]:
        """The tiers that a run has: those of the spec, on one node without the memory of others."""
        alone = self.cluster.nodes == 1
        return [tier for tier in self.tiers if not (alone and isinstance(tier, PeerTier))]

    @property
    def memory_tier(self) -> MemoryTier | None:
        """The memory tier, if the spec has one."""
        return next((tier for tier in self.tiers if isinstance(tier, MemoryTier)), None)

    @property
    def peer_tier(self) -> PeerTier | None:
        """The tier in the memory of other nodes, if the run has one."""
        return next((tier for tier in self.used_tiers if isinstance(tier, PeerTier)), None)

    @property
    def disk_tier(self) -> DiskTier | None:
        """The disk tier, if the spec has one."""
        return next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)

    @property
    def object_tier(self) -> ObjectTier | None:
        """The tier in an object store, if the spec has one."""
        return next((tier for tier in self.tiers if isinstance(tier, ObjectTier)), None)

    @property
    def unused(self) -> str | None:
        """What of the spec this run does without, and why; None: nothing."""
        if len(self.used_tiers) == len(self.tiers):
            return None
        return (
            "the peer tier is left out: with cluster.nodes 1 there is no other node to keep copies, so the loss of "
            "this one is survived by slower tiers only"
        )

    @property
    def slow_tiers(self) -> list[DiskTier | ObjectTier]:
        """The tiers that the drainer fills, fastest first."""
        return [tier for tier in self.tiers if isinstance(tier, SlowTier)]

    @property
    def first_slow_tier(self) -> DiskTier | ObjectTier | None:
        """The one that is filled from memory."""
        return next(iter(self.slow_tiers), None)
