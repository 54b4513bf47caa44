"""Named intermediate tensors of a forward, chosen by pattern and taken from outside the model.

A name is the module's name in the checkpoint, alone for its output, or with a field behind it:

| name | what, and the shape of a row |
|---|---|
| `rope.R.query`, `rope.R.entry` | rotations for layers of compression ratio R, `[half, 2]` |
| `token_window` | compressed token ids that the Engram hashes, `[Ng]` |
| `embed`, `layers.I`, `norm` | embedding `[D]`; residual streams behind block I `[M, D]`; final norm `[D]` |
| `layers.I.engram`, `.hash`, `.embed` | streams behind the Engram `[M, D]`; its table rows `[X]` and their values `[X, De]` |
| `layers.I.hc_attn.pre`, `.post`, `.comb` (also `hc_ffn`) | mixing coefficients `[M]`, `[M]`, `[M, M]` |
| `layers.I.hc_ffn.in` | streams between attention and feed-forward `[M, D]` |
| `layers.I.attn_norm.in` (also `ffn_norm`, `norm`) | collapsed streams: the input of a norm `[D]` |
| `layers.I.attn.query`, `.window` | rotated query heads `[H, Dh]`; the window row as it is kept `[Dh]` |
| `layers.I.attn.entries`, `.index_keys` | the compressed entry that ends at this row `[Dh]`, and its index key `[Di]` |
| `layers.I.attn.indexer.scores`, `.candidates` | index scores; entries that later index sources may choose, `[C]` |
| `layers.I.attn.indexer.selected` | chosen entry ids, -1 behind them, `[N]` |
| `layers.I.attn.heads`, `.wo_a.in`, `.attn` | what heads read `[H, Dh]`; turned back `[G, K]`; output of the sub-layer `[D]` |
| `layers.I.ffn.gate.scores`, `.ids`, `.weights` | biased scores `[E]`; chosen experts and their weights `[K]` |
| `layers.I.ffn.experts`, `.shared_experts`, `.ffn` | output of each chosen expert `[K, D]`, of the shared one, of all `[D]` |
| any `Linear` or `RMSNorm` of the checkpoint | its output |
| `mtp.token_ids`, `.logits`, `.confidence` | proposals, one row for each new token: `[Q]`, `[Q, V]`, `[Q]` |
| `mtp.inputs` | embeddings of the newest token and of noise tokens, `[Q, D]` |
| `mtp.J...` | as in a backbone block, one row for each proposal: `[Q, ...]` |
| `mtp.0.main_norm`, `mtp.J.attn.window.features` | what the draft blocks keep of the backbone's features `[D]`, `[Dh]` |

Elsewhere there is one row for each position. Rows that end no compressed entry are zero where only entries count.
In a pattern `*` stands for one part of a name (or some letters of it), `**` for any number of parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from deepinfer.config import ModelConfig
from deepinfer.dims import Shaped, Tensor
from deepinfer.errors import ConfigError
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.draft import Proposal
from deepinfer.model.hyper_connection import HyperConnection
from deepinfer.model.indexer import Indexer, Shared
from deepinfer.model.linear import Float32Linear
from deepinfer.model.moe import SharedExpert
from deepinfer.model.numerics import Numerics
from deepinfer.model.rope import RopeTables, RotaryEmbedding
from deepinfer.model.router import Router
from deepinfer.model.rows import Rows
from deepinfer.model.transformer import Transformer
from deepinfer.ops.elementwise import sqrt_softplus

DEFAULT_PATTERNS = (
    "embed",
    "layers.*",
    "layers.*.hc_ffn.pre",
    "layers.*.engram.hash",
    "layers.*.attn.entries",
    "layers.*.attn.indexer.selected",
    "layers.*.ffn.gate.ids",
    "layers.*.ffn.gate.weights",
    "mtp.[0-9]",
    "mtp.[0-9].hc_ffn.pre",
    "mtp.token_ids",
    "mtp.confidence",
)
PROPOSAL_FIELDS = ("mtp.token_ids", "mtp.logits", "mtp.confidence")
# Last parts of names that are no modules.
FIELDS = frozenset(
    (
        *("query", "entry", "window", "features", "entries", "index_keys", "heads", "in", "inputs"),
        *("pre", "post", "comb", "scores", "ids", "weights", "selected", "candidates"),
        *("token_ids", "logits", "confidence"),
    )
)
# What fills up rows of entry lists that grow with the sequence.
EMPTY_PLACE = {"scores": float("-inf"), "selected": -1, "candidates": 0}
SHOWN_NAMES = 4  # in a message
COLLAPSING_NORMS = ("attn_norm", "ffn_norm", "norm")
ENTRY_PARTS = ("compressor", "compressor.norm", "compressor.norm.in", "indexer.wk", "indexer.k_norm", "entries", "index_keys")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name fits one of the patterns."""
    return any(_fits(name.split("."), pattern.split(".")) for pattern in patterns)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Raises: ConfigError for anything but a sequence of non-empty strings."""
    if isinstance(patterns, str) or not all(isinstance(p, str) and p for p in patterns):
        raise ConfigError(f"patterns = {patterns!r}: expected a list of names such as 'layers.*.ffn.gate.ids'")
    return tuple(patterns)


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The patterns that no name fits."""
    known = list(names)
    return [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in known)]


def similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """A few of the names, those most like a pattern if any is."""
    return get_close_matches(pattern, names, SHOWN_NAMES) or list(names[:SHOWN_NAMES])


def module_of(name: str) -> str:
    """The checkpoint's module that computes a named tensor; "" is the model itself.

    An input (`.in`) is the doing of the module around the one that it goes into.
    """
    parts = name.split(".")
    if parts[0] == "rope":
        return "rope"
    if parts[-1] == "in":
        return ".".join(parts[:-2])
    while len(parts) > 1 and parts[-1] in FIELDS:
        parts.pop()
    return ".".join(parts)


class Observation:
    """What the hooks have caught since the last `take`. The reader of the model says which rows it runs."""

    def __init__(self, config: ModelConfig, patterns: Sequence[str]) -> None:
        self.config, self.patterns = config, patterns
        self.rows: Rows | None = None
        self.is_proposal = False
        self._caught: dict[str, list[Tensor]] = {}

    def wants(self, name: str) -> bool:
        return matches(name, self.patterns)

    @property
    def wants_drafts(self) -> bool:
        """Whether a pattern can fit a tensor of the draft blocks."""
        return any(
            pattern.partition(".")[0] in ("**", "mtp") or fnmatchcase("mtp", pattern.partition(".")[0]) for pattern in self.patterns
        )

    def keep(self, name: str, value: Shaped[Tensor, "..."]) -> None:
        """Remember a tensor if its name is wanted."""
        if self.is_proposal and name == "embed":
            name = "mtp.inputs"
        is_draft = name.startswith("mtp.")
        if self.is_proposal and not is_draft:
            return
        if is_draft and not self.is_proposal and ".attn." in name:
            name = f"{name}.features"
        if self.wants(name):
            self._caught.setdefault(name, []).append(value.detach())

    def keep_entries(self, name: str, value: Shaped[Tensor, "T ..."]) -> None:
        """Remember rows of which only those that complete an entry mean something."""
        assert self.rows is not None
        ratio = self.config.compress_ratios[int(name.split(".")[1])]
        completes = (self.rows.positions + 1) % ratio == 0
        self.keep(name, torch.where(completes.view(-1, *[1] * (value.dim() - 1)), value, 0))

    def take(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Everything caught, in execution order; what ran several times is stacked behind the rows. Forgets it."""
        caught, self._caught = self._caught, {}
        return {name: values[0] if len(values) == 1 else torch.stack(values, dim=1) for name, values in caught.items()}

    def keep_proposal(self, proposal: Proposal) -> None:
        """Remember what the draft blocks proposed."""
        for name, value in zip(PROPOSAL_FIELDS, proposal, strict=True):
            self.keep(name, value)

    def take_proposals(self, count: int) -> dict[str, Shaped[Tensor, "B Q ..."]]:
        """Everything caught of the proposals of `count` sequences, one row each. Forgets it."""
        return {name: v if v.shape[0] == count else v.unflatten(0, (count, -1)) for name, v in self.take().items()}


@contextmanager
def observing(model: Transformer, patterns: Sequence[str]) -> Iterator[Observation]:
    """Watch a model while the context lasts; modules that no pattern concerns are left alone."""
    observation, undo = Observation(model.config, patterns), []
    for path, module in model.named_modules():
        watch = _Watch(path, module, observation)
        watch.install()
        undo += watch.undo
    try:
        yield observation
    finally:
        for action in undo:
            action()


class _Watch:
    """The hooks on one module."""

    def __init__(self, path: str, module: nn.Module, seen: Observation) -> None:
        self.path, self.module, self.seen = path, module, seen
        self.undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Hook what a module of this kind shows."""
        path, module = self.path, self.module
        last = path.rpartition(".")[2]
        if isinstance(module, RotaryEmbedding):
            self.on_output({f"{r}.query": partial(_rotation, r, "query") for r in module.ratios})
            self.on_output({f"{r}.entry": partial(_rotation, r, "entry") for r in module.ratios if r > 1})
        elif isinstance(module, Block):
            self.on_output({"": lambda args, out: out[0]})
        elif isinstance(module, HyperConnection):
            before: Fields = {"in": lambda args, out: args[0]} if last == "hc_ffn" else {}
            self.on_output(before | {name: partial(_attribute, name) for name in ("pre", "post", "comb")})
        elif isinstance(module, Attention):
            self._watch_attention(module)
        elif isinstance(module, Indexer):
            self.on_output({name: partial(_attribute, name) for name in ("scores", "candidates", "selected")})
        elif isinstance(module, Router):
            scores = partial(_biased_scores, module)
            self.on_output({"scores": scores, "ids": lambda args, out: out.ids, "weights": lambda args, out: out.weights})
        elif last == "wo_a":
            self.on_method("forward_groups", {"in": lambda args, out: args[0], "": lambda args, out: out})
        elif path not in ("", "head", "mtp"):
            if isinstance(module, SharedExpert):
                self.on_linears("w1", "w3")
            shows_input = last in COLLAPSING_NORMS
            self.on_output(({"in": lambda args, out: args[0]} if shows_input else {}) | {"": lambda args, out: out})

    def _watch_attention(self, module: Attention) -> None:
        self.on_linears("wq_a", "wkv")
        self.on_method("_heads", {"query": lambda args, out: out[1]})
        self.on_method("_rows", {"window": lambda args, out: out})
        if module.compressor is not None:
            self.on_method("_publish_entries", {part: partial(_published, part) for part in ("entries", "index_keys")})
        self.on_method("_attend", {"heads": lambda args, out: out})
        self.on_output({"": lambda args, out: out[0]})

    def on_output(self, fields: "Fields") -> None:
        """Keep fields of what the module is called with and returns."""
        if self._wants(fields):
            hook = self.module.register_forward_hook(lambda _, args, out: self._keep(fields, args, out))
            self.undo.append(hook.remove)

    def on_method(self, name: str, fields: "Fields") -> None:
        """The same for a method that the module's own `forward` calls."""
        if not self._wants(fields):
            return
        method = getattr(self.module, name)

        def watched(*args: Any) -> Any:
            out = method(*args)
            self._keep(fields, args, out)
            return out

        self.module.__dict__[name] = watched
        self.undo.append(partial(self.module.__dict__.pop, name))

    def on_linears(self, *names: str) -> None:
        """Keep the products of matrices that the module hands to `ops.linears` together instead of calling each."""
        if not self._wants(names):
            return
        module: Any = self.module
        own: Numerics = module.numerics
        name_of = {id(getattr(module, name)): name for name in names}

        def watched(x: Tensor, matrices: tuple[Any, ...], numerics: Numerics) -> tuple[Tensor, ...]:
            products = own.ops.linears(x, matrices, numerics)
            for matrix, product in zip(matrices, products, strict=True):
                self.seen.keep(self._named(name_of[id(matrix)]), product)
            return products

        module.numerics = replace(own, ops=replace(own.ops, linears=watched))
        self.undo.append(partial(setattr, module, "numerics", own))

    def _named(self, field: str) -> str:
        return f"{self.path}.{field}" if field else self.path

    def _wants(self, fields: Iterable[str]) -> bool:
        names = [self._named(field) for field in fields]
        names += [f"{name}.features" for name in names]
        return any(self.seen.wants(name) for name in names) or (self.path == "embed" and self.seen.wants("mtp.inputs"))

    def _keep(self, fields: "Fields", args: Any, out: Any) -> None:
        for field, read in fields.items():
            name = self._named(field)
            value = read(args, out)
            if not isinstance(value, Tensor):
                continue
            if name.partition(".attn.")[2] in ENTRY_PARTS:
                self.seen.keep_entries(name, value)
            else:
                self.seen.keep(name, value)


# Field of a name -> how to read it from a call's arguments and result.
Fields = dict[str, Callable[[Any, Any], Tensor | None]]


def _attribute(name: str, args: Any, out: Any) -> Tensor | None:
    value: Tensor | None = getattr(out, name)
    return value


def _rotation(ratio: int, kind: str, args: Any, out: RopeTables) -> Tensor:
    value: Tensor = getattr(out.table(ratio), kind)
    return value


def _biased_scores(router: Router, args: Any, out: Any) -> Tensor:
    """What the choice is made by; the router does not return it."""
    raw = Float32Linear.forward(router, args[0])
    return router.numerics.ops.pointwise(sqrt_softplus, raw) + router.bias


def _published(part: str, args: Any, out: Shared) -> Tensor:
    """What a KV source has just written for the rows of this forward."""
    rows: Rows = args[1]
    assert out.pool is not None
    address = out.pool.addresses(rows, (rows.positions // out.pool.ratio)[:, None]).squeeze(1)
    stored: Tensor = getattr(out.pool, part)
    return stored[address]
