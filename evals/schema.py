"""The typed shape of a composed config. Hydra merges conf/*.yaml into these dataclasses.

Every field's docstring is what ``python run.py --help`` prints. No MLX, no MLflow here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gear.config import GearConfig


@dataclass
class ModelConfig:
    """model=: which language model is evaluated."""

    name: str = "???"
    """The option's name, in tables."""
    source: str = "???"
    """smollm2 (the bundled asset), tiny (random llama built in code), hub, or local (a folder)."""
    path: str | None = None
    """Folder of a local model (config.json, *.safetensors, tokenizer.json)."""
    repo: str | None = None
    """Hub id, as owner/name."""
    revision: str | None = None
    """Hub revision; null = main, and the resolved commit is recorded."""
    dtype: str = "auto"
    """Compute dtype: float32, float16, bfloat16; auto = float32 on Linux CPUs, else stored"""
    layers: int = 2
    """tiny: number of layers."""
    heads: int = 4
    """tiny: query heads."""
    kv_heads: int = 2
    """tiny: K/V heads."""
    head_dim: int = 64
    """tiny: channels per head."""
    vocab_size: int = 257
    """tiny: vocabulary (bytes and a BOS)."""
    seed: int = 0
    """tiny: seed of the random weights."""


@dataclass
class DatasetConfig:
    """dataset=: which documents are scored, or which task's items are asked."""

    name: str = "???"
    """The option's name, in tables."""
    source: str = "???"
    """embedded (texts in the package), hub (`datasets`), file, package (fetched), generated."""
    task: str | None = None
    """A downstream task: lm-eval's name of it, or a generator's; null = plain text."""
    limit: int | None = None
    """Documents used, from the front; of a task a seeded subset of the items; null = all."""
    path: str | None = None
    """file: .txt, .jsonl, .parquet, or a folder (of TASK.jsonl); hub: one file of the repo."""
    repo: str | None = None
    """hub: dataset id (a task's YAML names its own)."""
    config: str | None = None
    """hub: configuration name (a task's YAML names its own)."""
    split: str = "test"
    """hub: split (a task's YAML names its own)."""
    revision: str | None = None
    """hub: pinned revision; of a task in place of its YAML's."""
    text_field: str = "text"
    """hub, jsonl, parquet: the field that holds the text."""
    join_documents: bool = False
    """Join all rows into one document (wikitext's rows are lines)."""
    windows_per_document: int | None = 1
    """Windows taken from each document, from its start; null = as many as fit."""
    num_fewshot: int | None = None
    """task: exemplars in front of every item, the first of their split; null = the task's own."""
    fewshot_path: str | None = None
    """task from a file: the rows of the few-shot split, as `path`."""
    metric: str | None = None
    """task: the metric that tables show, with its filter; null = the first."""
    min_context_tokens: int | None = None
    """task: leave out items with fewer tokens of context, before limit; null = none."""
    lengths: list[int] | None = None
    """generated: lengths of the prompts in tokens."""
    depths: list[float] | None = None
    """generated: where the answer lies, 0 (start) to 1 (end); null = not placed."""
    per_cell: int = 1
    """generated: items of each length and depth."""


@dataclass
class EvalConfig:
    """eval=: what is measured and by which protocol."""

    name: str = "???"
    """The option's name, in tables."""
    task: str = "perplexity"
    """perplexity (with fidelity against fp16), reconstruction, or downstream (a task's items)."""
    protocol: str = "decode"
    """decode (blocks form while scoring), prefix (scored in one call), oneshot (sanity check)."""
    prefill_tokens: int = 512
    """P: tokens of a window that enter as prefill and are not scored."""
    scored_tokens: int = 128
    """T: tokens fed after them; each predicts its successor."""
    chunk: int | None = None
    """Tokens fed per call while scoring; null = ends at block boundaries (64 without n_b)."""
    prefill: str = "exact"
    """exact (over an exact cache, then compressed at once) or streaming (through the cache)."""
    prefill_chunk: int = 2048
    """Tokens per prefill call."""
    attention: str = "packed"
    """packed (GEAR's caches attend to what they store) or dense (K and V reconstructed first)."""
    tile_tokens: int = 1024
    """Tokens that packed attention unpacks at a time where many queries attend."""
    batch_size: int = 1
    """downstream: generations that are decoded together."""
    max_new_tokens: int | None = None
    """downstream: the most tokens of a generation; null = what the task says."""
    chat_template: bool = False
    """downstream: ask in the model's chat template."""
    system_prompt: str | None = None
    """downstream: a text in front of the task's own."""
    add_bos: bool | None = None
    """downstream: begin every prompt with the BOS token; null = as the tokenizer does by itself."""
    allow_uncompressed: bool = False
    """Let a run pass whose compressed share is too small to mean anything; the table is marked."""
    bootstrap_samples: int = 2000
    """Resamples of the document-level bootstrap."""
    confidence: float = 0.95
    """Level of the intervals."""


@dataclass
class TrackingConfig:
    """tracking=: where runs are shown. Records are written in any case."""

    name: str = "???"
    """mlflow, or none."""
    enabled: bool = True
    """Log to MLflow."""
    uri: str | None = None
    """Tracking store; null = sqlite:///<results root>/mlflow.db."""
    experiment_name: str = "gear"
    """MLflow experiment."""


@dataclass
class JobConfig:
    """job.*: limits of one job; a job over a limit is recorded FAILED and the sweep goes on."""

    time_limit_s: float | None = None
    """Wall-clock seconds; null = none."""
    memory_limit_gib: float | None = None
    """Resident memory of the worker in GiB; null = none, but what the machine lacks is refused."""
    retries: int = 1
    """Times a job is run again whose worker was killed from outside or crashed; 0 = none."""
    fail_fast: bool = False
    """Run no more jobs of the sweep once one has failed."""
    prefill_memory_gib: float = 2.0
    """Exact prefills that the jobs of a sweep share, in GiB; the least recently used go first."""
    prefill_spill: bool = False
    """Keep on disk what goes, in the worker's temporary folder, instead of forgetting it."""
    share: str | None = None
    """URL of a folder (s3://…, gs://…, az://…) where machines share finished records, or null."""
    dry_run: bool = False
    """List every job with its state (done, to do, failed before, cannot run here); run none."""


@dataclass
class Config:
    """One job: every group composed and typed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    gear: GearConfig = field(default_factory=GearConfig)
    cache: dict[str, Any] = field(default_factory=dict)
    """The method's own options; typed by the method's dataclass (gear/methods)."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    job: JobConfig = field(default_factory=JobConfig)
    seed: int = 0
    """Seed of subsets and bootstraps."""
    device: str = "auto"
    """auto (from the installed MLX), cpu, metal or cuda."""
