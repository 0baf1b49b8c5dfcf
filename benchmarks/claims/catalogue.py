"""The claims, and the ablations that test them."""

from benchmarks.claims.claim import Claim, Source
from benchmarks.claims.loading import LOADING
from benchmarks.claims.measuring import Ablation
from benchmarks.claims.processes import PROCESSES
from benchmarks.claims.ranks import RANKS
from benchmarks.claims.training import TRAINING

# In the order in which they are measured: what takes long comes last.
ABLATIONS: dict[str, Ablation] = {**PROCESSES, **TRAINING, **RANKS, **LOADING}
_LAST = ("compile", "rules", "allocators", "jemalloc", "tcmalloc", "numa", "utilization")

_DOCS = "https://docs.pytorch.org"
# What practitioners tell each other about PyTorch, with these figures; no one document.
FIELD = Source("field guides, as this project collected their figures")
TUNING = Source("PyTorch, Performance Tuning Guide", f"{_DOCS}/tutorials/recipes/recipes/tuning_guide")
PINNED = Source(
    "PyTorch, good usage of non_blocking and pin_memory()",
    f"{_DOCS}/tutorials/intermediate/pinmem_nonblock.html",
)
LAYOUT = Source(
    "PyTorch, Channels Last Memory Format", f"{_DOCS}/tutorials/intermediate/memory_format_tutorial.html"
)
CUDA = Source("PyTorch, CUDA semantics", f"{_DOCS}/docs/stable/notes/cuda.html")
ADAMW = Source("PyTorch, torch.optim.AdamW", f"{_DOCS}/docs/stable/generated/torch.optim.AdamW.html")
ZEROS = Source(
    "PyTorch, Optimizer.zero_grad", f"{_DOCS}/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"
)
DDP = Source(
    "PyTorch, DistributedDataParallel",
    f"{_DOCS}/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
)
HOOKS = Source("PyTorch, DDP communication hooks", f"{_DOCS}/docs/stable/ddp_comm_hooks.html")
NUMA = Source("PyTorch, NUMA binding", f"{_DOCS}/docs/main/elastic/numa.html")
COMPILE = Source("PyTorch, torch.compile", "https://github.com/pytorch/pytorch/issues/93794")
XEON = Source(
    "Intel Extension for PyTorch, Performance Tuning Guide",
    "https://intel.github.io/intel-extension-for-pytorch/latest/tutorials/performance_tuning/tuning_guide.html",
)
OURS = Source("this project's README")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "pinned",
        "pinned memory and non_blocking: loading takes 10 to 30 % less",
        *(FIELD, "transfer", "pageable", "pinned, non_blocking", 0.90),
        needs=("cuda",),
    ),
    Claim(
        "pinned-blocking",
        "pinned memory alone: faster",
        *(PINNED, "transfer", "pageable", "pinned"),
        needs=("cuda",),
    ),
    Claim(
        "non-blocking-pageable",
        "non_blocking alone, from pageable memory: faster",
        *(PINNED, "transfer", "pageable", "pageable, non_blocking"),
        needs=("cuda",),
    ),
    Claim(
        "pinned-copy",
        "the copy itself is 30 to 50 % shorter from pinned memory",
        *(FIELD, "copy", "pageable", "pinned", 0.70),
        needs=("cuda",),
    ),
    Claim("workers-1", "num_workers 1: faster than 0", *(TUNING, "workers", "0 workers", "1 workers")),
    Claim("workers-2", "num_workers 2: faster than 0", *(TUNING, "workers", "0 workers", "2 workers")),
    Claim(
        "workers-quota",
        "num_workers from the CPU quota: faster than 0",
        *(TUNING, "workers", "0 workers", "the quota"),
    ),
    Claim(
        "loader-settings",
        "20 % more throughput from the loader's settings alone",
        *(FIELD, "workers", "0 workers", "by rule", 1 / 1.2),
    ),
    Claim(
        "rule-of-cores",
        "workers for 70 to 80 % of the cores: within 5 % of what a search finds",
        *(FIELD, "rules", "the search", "75 % of the CPUs", 1.05),
    ),
    Claim(
        "rule-of-four",
        "4 workers per GPU: within 5 % of what a search finds",
        *(FIELD, "rules", "the search", "4 per GPU", 1.05),
    ),
    Claim(
        "persistent-workers",
        "persistent workers: 5 to 10 % less over many epochs",
        *(FIELD, "persistence", "started anew", "persistent", 0.95),
    ),
    Claim("prefetch-2", "prefetch factor 2: faster than 1", *(FIELD, "prefetch", "1 ahead", "2 ahead")),
    Claim("prefetch-4", "prefetch factor 4: faster than 2", *(FIELD, "prefetch", "2 ahead", "4 ahead")),
    Claim("uint8", "uint8 until the device: faster than floats", *(OURS, "floats", "float32", "uint8")),
    Claim(
        "uint8-bytes",
        "uint8 until the device: about a quarter of the bytes",
        *(OURS, "floats", "float32", "uint8", 0.26, "bytes"),
    ),
    Claim(
        "pack", "a pack: an image takes about half of the time", *(OURS, "packs", "JPEG files", "pack", 0.55)
    ),
    Claim(
        "pack-raw",
        "a pack of pixels: an image takes about a quarter",
        *(OURS, "packs", "JPEG files", "raw pack", 0.30),
    ),
    Claim(
        "cudnn-benchmark",
        "cudnn.benchmark: faster where shapes are fixed",
        *(TUNING, "cudnn", "heuristics", "timed"),
        needs=("cuda",),
    ),
    Claim(
        "channels-last",
        "channels_last: 8 to 35 % faster (on a V100, with AMP)",
        *(LAYOUT, "layout", "NCHW", "NHWC", 1 / 1.08),
    ),
    Claim("tf32", "TF32: faster than fp32", *(CUDA, "precision", "fp32", "tf32"), needs=("cuda",)),
    Claim(
        "fp16",
        "fp16 with its scaler: 1.5 to 3 x as fast",
        *(FIELD, "precision", "fp32", "fp16", 1 / 1.5),
        needs=("cuda",),
    ),
    Claim(
        "fp16-memory",
        "fp16 with its scaler: 40 % less memory",
        *(FIELD, "precision", "fp32", "fp16", 0.60, "memory"),
        needs=("cuda",),
    ),
    Claim("bf16", "bf16: 1.5 to 3 x as fast", *(FIELD, "precision", "fp32", "bf16", 1 / 1.5)),
    Claim("bf16-memory", "bf16: 40 % less memory", *(FIELD, "precision", "fp32", "bf16", 0.60, "memory")),
    Claim(
        "accumulation-memory",
        "gradient accumulation (4 micro-batches): less memory for the same batch",
        *(FIELD, "accumulation", "one micro-batch", "4 micro-batches"),
        quantity="memory",
    ),
    Claim(
        "checkpointing-all-memory",
        "activation checkpointing of all blocks: 70 % less memory (activations, gradients)",
        *(FIELD, "checkpointing", "none", "all", 0.30, "peak"),
    ),
    Claim(
        "checkpointing-all-time",
        "activation checkpointing of all blocks: at most 20 to 30 % more time",
        *(FIELD, "checkpointing", "none", "all", 1.30),
    ),
    Claim(
        "checkpointing-some-memory",
        "activation checkpointing of every other block: less memory (activations, gradients)",
        *(FIELD, "checkpointing", "none", "some"),
        quantity="peak",
    ),
    Claim(
        "checkpointing-some-time",
        "activation checkpointing of every other block: at most 20 to 30 % more time",
        *(FIELD, "checkpointing", "none", "some", 1.30),
    ),
    Claim("compile", "torch.compile: 1.3 to 2 x as fast", *(COMPILE, "compile", "none", "default", 1 / 1.3)),
    Claim(
        "compile-reduce-overhead",
        "torch.compile with CUDA graphs (reduce-overhead): faster than without",
        *(COMPILE, "compile", "default", "reduce-overhead"),
        needs=("cuda",),
    ),
    Claim(
        "compile-max-autotune",
        "torch.compile with max-autotune: faster than its default",
        *(COMPILE, "compile", "default", "max-autotune"),
        needs=("cuda",),
    ),
    Claim(
        "fused",
        "fused optimizer: a step is faster than with a loop",
        *(ADAMW, "optimizer", "for-loop", "fused"),
    ),
    Claim(
        "fused-foreach",
        "fused optimizer: a step is faster than with foreach",
        *(ADAMW, "optimizer", "foreach", "fused"),
    ),
    Claim("zero-grad", "zero_grad(set_to_none): modestly faster", *(ZEROS, "gradients", "zeros", "None")),
    Claim(
        "zero-grad-memory",
        "zero_grad(set_to_none): less memory",
        *(ZEROS, "gradients", "zeros", "None"),
        quantity="memory",
    ),
    Claim(
        "allocator-expandable",
        "expandable segments: less memory is reserved",
        *(CUDA, "allocators", "native", "expandable"),
        quantity="reserved",
        needs=("cuda",),
    ),
    Claim(
        "allocator-async",
        "cudaMallocAsync: as fast as PyTorch's allocator, within 2 %",
        *(CUDA, "allocators", "native", "async", 1.02),
        needs=("cuda",),
    ),
    Claim(
        "managed-off",
        "unified memory beyond the card's size is off by default",
        *(OURS, "managed", "recipes", "managed", 0.0, "count"),
    ),
    Claim(
        "omp-quota",
        "compute threads as the quota allows: faster than 1 (OMP_NUM_THREADS=1, torchrun's default)",
        *(TUNING, "threads", "1 thread", "the quota"),
    ),
    Claim(
        "omp-twice",
        "compute threads as the quota allows: faster than twice as many",
        *(TUNING, "threads", "twice the quota", "the quota"),
    ),
    Claim("jemalloc", "jemalloc on a CPU: faster than malloc", *(XEON, "jemalloc", "malloc", "jemalloc")),
    Claim("tcmalloc", "tcmalloc on a CPU: faster than malloc", *(XEON, "tcmalloc", "malloc", "tcmalloc")),
    Claim("numa", "NUMA binding: 1 to 10 % faster", *(NUMA, "numa", "none", "node", 0.99)),
    Claim(
        "ddp-bucket-view",
        "DDP, gradient_as_bucket_view: no copies, so faster",
        *(DDP, "ddp", "copied", "views"),
    ),
    Claim(
        "ddp-bucket-view-memory",
        "DDP, gradient_as_bucket_view: less memory at a step's peak",
        *(DDP, "ddp", "copied", "views"),
        quantity="peak",
    ),
    Claim("ddp-bf16", "DDP, bf16 compression: faster", *(HOOKS, "ddp", "views", "bf16")),
    Claim(
        "ddp-bf16-bytes",
        "DDP, bf16 compression: half of the bytes on the wire",
        *(HOOKS, "ddp", "views", "bf16", 0.51, "bytes"),
    ),
    Claim("item", "no .item() in each step: faster than with it", *(TUNING, "item", "read", "not read")),
    Claim(
        "logging",
        "a row of metrics every 50 steps: faster than each step",
        *(FIELD, "logging", "each step", "every 50"),
    ),
    Claim(
        "utilization",
        "above 90 % GPU utilization with 16 cores: idle at most 10 % of the time",
        *(FIELD, "utilization", "all of it", "idle", 0.10),
        needs=("cuda", "16 CPUs"),
    ),
)


def in_turn(names: set[str]) -> list[str]:
    """Ablations in the order in which they are measured."""
    return [name for name in ABLATIONS if name in names and name not in _LAST] + [
        name for name in _LAST if name in names
    ]
