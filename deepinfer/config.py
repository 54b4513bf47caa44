"""What a model is: frozen configuration records and their validation.

Field names are the runtime names of the published inference code (`dim`, `n_layers`, `window_size`, ...); `config_json.py`
maps the keys of a checkpoint's `config.json` to them. Layer ids count the draft blocks on from the backbone: with 40 backbone
layers, `mtp.0` is layer 40. No torch here: dtypes and formats are named by strings.
Source: specification sections 1, 2 and 10.2.
"""

from dataclasses import dataclass, field

from deepinfer.errors import ConfigError

QUANT_BLOCK = 32  # channels that share one UE8M0 scale, in every quantised format of the release (section 6)


def check(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise `ConfigError` that names the field, its value and the rule it breaks."""
    if not condition:
        raise ConfigError(f"{name} = {value!r}: {rule}")


def check_positive(record: object, *names: str) -> None:
    """Raise `ConfigError` for the first of the named fields that is below 1."""
    for name in names:
        value = getattr(record, name)
        check(value >= 1, name, value, "must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding: one plain table for window-only layers, one with YaRN for the others (section 7)."""

    theta: float = 10000.0
    compress_theta: float = 160000.0
    # 0 means that no YaRN is applied to the compressed layers' table.
    original_seq_len: int = 65536
    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for name, theta in (("rope_theta", self.theta), ("compress_rope_theta", self.compress_theta)):
            check(theta > 1, name, theta, "must be above 1")
        check(self.original_seq_len >= 0, "original_max_position_embeddings", self.original_seq_len, "must not be negative")
        check(self.factor >= 1, "rope_scaling.factor", self.factor, "must be at least 1")
        for name, beta in (("rope_scaling.beta_fast", self.beta_fast), ("rope_scaling.beta_slow", self.beta_slow)):
            check(beta > 0, name, beta, "must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Low-rank queries, one shared key-value head, grouped low-rank output (section 8)."""

    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window_size: int  # tokens a query sees, itself included

    def __post_init__(self) -> None:
        check_positive(self, "n_heads", "head_dim", "rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "window_size")
        check(self.rope_head_dim % 2 == 0, "qk_rope_head_dim", self.rope_head_dim, "must be even: channels rotate in pairs")
        check(self.rope_head_dim <= self.head_dim, "qk_rope_head_dim", self.rope_head_dim, f"exceeds head_dim {self.head_dim}")
        check(self.n_heads % self.o_groups == 0, "o_groups", self.o_groups, f"must divide num_attention_heads {self.n_heads}")
        check(self.head_dim % QUANT_BLOCK == 0, "head_dim", self.head_dim, f"must be a multiple of {QUANT_BLOCK}")

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """Which compressed entries a query attends to, and the two-level candidate filter (sections 8.6, 8.7)."""

    n_heads: int = 0
    head_dim: int = 0
    topk: int = 0
    candidate_source_layer: int = -1  # -1: no candidate filter
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0  # entries per candidate block


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Routed experts with one shared expert; `noaux_tc` routing on sqrt(softplus) scores (section 9)."""

    inter_dim: int
    n_routed_experts: int
    n_activated_experts: int
    route_scale: float = 1.5
    swiglu_limit: float = 10.0  # 0 means no clamp

    def __post_init__(self) -> None:
        check_positive(self, "inter_dim")
        check(self.swiglu_limit >= 0, "swiglu_limit", self.swiglu_limit, "must not be negative")
        check(self.inter_dim % QUANT_BLOCK == 0, "moe_intermediate_size", self.inter_dim, f"must be a multiple of {QUANT_BLOCK}")
        check(
            1 <= self.n_activated_experts <= self.n_routed_experts,
            "num_experts_per_tok",
            self.n_activated_experts,
            f"must lie between 1 and the number of routed experts, {self.n_routed_experts}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnectionConfig:
    """Parallel residual streams and the Sinkhorn normalisation of their mixing matrix (section 4)."""

    mult: int = 4
    sinkhorn_iters: int = 20
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check(self.mult >= 1, "hc_mult", self.mult, "must be at least 1")
        check(self.sinkhorn_iters >= 1, "hc_sinkhorn_iters", self.sinkhorn_iters, "must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramConfig:
    """Hashed n-gram memory in front of some layers (section 10). No layers: the model has none."""

    layer_ids: tuple[int, ...] = ()
    num_embeddings: tuple[int, ...] = ()  # table rows of each layer
    max_ngram_size: int = 1
    vocab_size: int = 0  # the search for hash moduli starts just below it
    n_heads: int = 0  # hash heads for each n-gram order
    head_dim: int = 0  # channels of one table row
    pad_token_id: int = 0  # raw token id; mapped through the token map before use
    compressed_vocab_size: int = 0

    def __post_init__(self) -> None:
        check(len(self.layer_ids) == len(self.num_embeddings), "engram_num_embeddings", self.num_embeddings, "one per Engram layer")
        if self.layer_ids:
            check(sorted(set(self.layer_ids)) == list(self.layer_ids), "engram_layer_ids", self.layer_ids, "must ascend")
            check_positive(self, "vocab_size", "n_heads", "head_dim", "compressed_vocab_size")
            check(self.max_ngram_size >= 2, "engram_max_ngram_size", self.max_ngram_size, "must be at least 2")
            check(self.head_dim % QUANT_BLOCK == 0, "engram_head_dim", self.head_dim, f"must be a multiple of {QUANT_BLOCK}")

    @property
    def n_columns(self) -> int:
        """Table rows looked up for each token and layer."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """The DSpark draft blocks (section 11). `n_layers` 0: the model drafts nothing."""

    n_layers: int = 0
    block_size: int = 0  # tokens drafted per step
    noise_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()  # backbone layers whose input streams are the features
    markov_rank: int = 0
    n_routed_experts: int = 0
    n_activated_experts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A whole DeepSeek-V4.1-Flash model, without its vision tower."""

    vocab_size: int
    dim: int
    n_layers: int
    max_seq_len: int
    attention: AttentionConfig
    moe: MoEConfig
    compress_ratios: tuple[int, ...]  # one per backbone layer, then one per draft block; 0 is window only
    kv_source_layers: tuple[int, ...] = ()
    index_source_layers: tuple[int, ...] = ()
    indexer: IndexerConfig = field(default_factory=IndexerConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    hyper_connection: HyperConnectionConfig = field(default_factory=HyperConnectionConfig)
    engram: EngramConfig = field(default_factory=EngramConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    norm_eps: float = 1e-20
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    # False: linears and experts are stored in bf16 without scales (Engram tables are FP8 either way).
    quantized: bool = True

    def __post_init__(self) -> None:
        ratios, n = self.compress_ratios, self.n_layers
        check_positive(self, "vocab_size", "dim", "n_layers", "max_seq_len")
        check(self.norm_eps >= 0, "norm_eps", self.norm_eps, "must not be negative")
        check(self.draft.n_layers >= 0, "num_nextn_predict_layers", self.draft.n_layers, "must not be negative")
        check(self.dim % QUANT_BLOCK == 0, "hidden_size", self.dim, f"must be a multiple of {QUANT_BLOCK}")
        check(len(ratios) == n + self.draft.n_layers, "compress_ratios", ratios, f"needs {n + self.draft.n_layers} entries")
        check(all(r in (0, 1, 2) for r in ratios), "compress_ratios", ratios, "only the ratios 0, 1 and 2 exist")
        check(not any(ratios[n:]), "compress_ratios", ratios, "draft blocks are window only (ratio 0)")
        self._check_sources()
        self._check_draft()
        e = self.engram
        check(all(0 <= i < n for i in e.layer_ids), "engram_layer_ids", e.layer_ids, f"ids must lie in [0, {n})")
        ids = {name: getattr(self, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if e.layer_ids:
            ids["engram_pad_token_id"] = e.pad_token_id
        for name, token in ids.items():
            check(0 <= token < self.vocab_size, name, token, f"outside the vocabulary of {self.vocab_size}")

    def _check_sources(self) -> None:
        compressed = [i for i in range(self.n_layers) if self.compress_ratios[i]]
        kv, index, candidate = self.kv_source_layers, self.index_source_layers, self.indexer.candidate_source_layer
        for name, layers in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
            check(sorted(set(layers)) == list(layers), name, layers, "must ascend without repetition")
            check(set(layers) <= set(compressed), name, layers, "must be layers with a compression ratio above 0")
        check(set(kv) <= set(index), "kv_source_layer_ids", kv, "every KV source must also be an index source")
        for layer in compressed:
            check(bool(kv) and kv[0] <= layer, "kv_source_layer_ids", kv, f"no source at or before compressed layer {layer}")
            source = self.kv_source(layer)
            check(
                self.compress_ratios[source] == self.compress_ratios[layer],
                "compress_ratios",
                self.compress_ratios,
                f"layer {layer} has another ratio than its KV source {source}",
            )
        if compressed:
            ix = self.indexer
            check(min(ix.n_heads, ix.head_dim, ix.topk) >= 1, "index_topk", ix.topk, "indexer sizes must be at least 1")
            check(ix.head_dim % QUANT_BLOCK == 0, "index_head_dim", ix.head_dim, f"must be a multiple of {QUANT_BLOCK}")
            check(ix.head_dim >= self.attention.rope_head_dim, "index_head_dim", ix.head_dim, "is smaller than qk_rope_head_dim")
        if candidate >= 0:
            check(candidate in kv, "candidate_source_layer_id", candidate, "must be a KV source layer")
            later = [i for i in index if i > candidate]
            check(
                all(self.kv_source(i) == candidate for i in later),
                "candidate_source_layer_id",
                candidate,
                "later index sources must share its entries: a candidate mask is for positions of one source",
            )
            sizes = (self.indexer.candidate_topk_blocks, self.indexer.candidate_block_size)
            check(min(sizes) >= 1, "candidate_topk_blocks", sizes, "blocks and block size must be at least 1")

    def _check_draft(self) -> None:
        d = self.draft
        if not d.n_layers:
            return
        check(d.block_size >= 1, "dspark_block_size", d.block_size, "must be at least 1")
        check(0 <= d.noise_token_id < self.vocab_size, "dspark_noise_token_id", d.noise_token_id, "outside the vocabulary")
        check(bool(d.target_layer_ids), "dspark_target_layer_ids", d.target_layer_ids, "must name at least one layer")
        check(
            all(0 <= i < self.n_layers for i in d.target_layer_ids),
            "dspark_target_layer_ids",
            d.target_layer_ids,
            "outside the backbone",
        )
        check(d.markov_rank >= 1, "dspark_markov_rank", d.markov_rank, "must be at least 1")
        check(
            1 <= d.n_activated_experts <= d.n_routed_experts,
            "dspark_num_experts_per_tok",
            d.n_activated_experts,
            "exceeds the experts",
        )

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries and index keys `layer` reads: the largest KV source not above it."""
        return max(i for i in self.kv_source_layers if i <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses: the largest index source not above it."""
        return max(i for i in self.index_source_layers if i <= layer)

    @property
    def draft_moe(self) -> MoEConfig:
        """The MoE of the draft blocks: same width and limits, fewer experts."""
        return MoEConfig(
            inter_dim=self.moe.inter_dim,
            n_routed_experts=self.draft.n_routed_experts,
            n_activated_experts=self.draft.n_activated_experts,
            route_scale=self.moe.route_scale,
            swiglu_limit=self.moe.swiglu_limit,
        )
