"""Names of tensors: stable, in execution order, chosen by pattern, and the model is left as it was."""

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.golden.observe import DEFAULT_PATTERNS, check_patterns, matches, module_of, observing
from deepinfer.golden.reading import read_sequences
from deepinfer.golden.row_sizes import row_sizes
from deepinfer.model.transformer import Transformer
from tests.golden_tool.recordings import ALL, PROMPT, TWO_TOKENS, clean_model, fresh_model


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("layers.3", "layers.*", True),
        ("layers.3.ffn", "layers.*", False),
        ("layers.3.ffn.gate.ids", "layers.*.ffn.gate.ids", True),
        ("layers.3.ffn.gate.ids", "**.ids", True),
        ("layers.13", "layers.[0-2]", False),
        ("layers.3.attn.wq_a", "layers.3.attn.w*", True),
        ("layers.3.attn.wq_a", "layers.**", True),
        ("layers.3", "layers.3.**", True),
        ("embed", "**", True),
        ("embed", "layers.**", False),
    ],
)
def test_patterns_go_by_the_parts_of_a_name(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, [pattern]) is expected


@pytest.mark.parametrize("patterns", ["layers.*", [""], [3]])
def test_patterns_are_a_list_of_names(patterns: object) -> None:
    with pytest.raises(ConfigError, match="expected a list of names"):
        check_patterns(patterns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("layers.3.ffn.gate.ids", "layers.3.ffn.gate"),
        ("layers.3", "layers.3"),
        ("layers.3.attn.query", "layers.3.attn"),
        ("layers.3.attn.wo_a.in", "layers.3.attn"),
        ("layers.3.attn_norm.in", "layers.3"),
        ("layers.3.hc_ffn.in", "layers.3"),
        ("layers.3.hc_attn.comb", "layers.3.hc_attn"),
        ("layers.2.attn.indexer.scores", "layers.2.attn.indexer"),
        ("rope.1.query", "rope"),
        ("norm.in", ""),
        ("mtp.logits", "mtp"),
        ("mtp.0.attn.window.features", "mtp.0.attn"),
        ("embed", "embed"),
    ],
)
def test_a_name_tells_its_module(name: str, module: str) -> None:
    assert module_of(name) == module


def test_names_come_in_execution_order_and_modules_exist() -> None:
    reading = read_sequences(clean_model(), [PROMPT], params=TWO_TOKENS, patterns=ALL)[0]
    names = list(reading.tensors)
    wanted = [
        "rope.0.query",
        "embed",
        "layers.0.hc_attn.pre",
        "layers.0.attn_norm.in",
        "layers.0.attn.wq_a",
        "layers.0.attn.query",
        "layers.0.attn.window",
        "layers.0.attn.heads",
        "layers.0.attn.wo_a.in",
        "layers.0.attn",
        "layers.0.hc_ffn.in",
        "layers.0.ffn.shared_experts.w1",
        "layers.0.ffn.gate.ids",
        "layers.0.ffn.experts",
        "layers.0",
        "layers.1.engram.hash",
        "layers.1.engram",
        "layers.2.attn.entries",
        "layers.2.attn.indexer.selected",
        "layers.8",
        "norm",
        "mtp.0.attn.window.features",
        "mtp.inputs",
        "mtp.2",
        "mtp.token_ids",
    ]
    assert [name for name in names if name in wanted] == wanted
    modules = dict(clean_model().named_modules())
    assert {module_of(name) for name in names} <= modules.keys()
    # What decides a comparison is written down before it is announced.
    sizes = row_sizes(clean_model(), ALL, len(PROMPT) + 2)
    assert list(sizes) == names
    for name, size in sizes.items():
        value = reading.tensors[name]
        assert (tuple(value.shape[1:]), value.dtype) == (size.shape, size.dtype), name
        assert value.shape[0] == (2 if size.is_proposal else len(PROMPT) + 1), name


def test_observed_tensors_are_what_the_model_computes() -> None:
    model = clean_model()
    reading = read_sequences(model, [PROMPT], patterns=["layers.*", "norm", "layers.*.ffn.gate.*", "**.hash"])[0]
    with torch.no_grad():
        assert torch.equal(model.head(reading.tensors["norm"]), reading.logits)
        assert torch.equal(model(torch.tensor(PROMPT)), reading.logits)
    scores, ids = reading.tensors["layers.3.ffn.gate.scores"], reading.tensors["layers.3.ffn.gate.ids"]
    assert torch.equal(scores.topk(2, dim=1).indices, ids)
    assert reading.tensors["layers.4.engram.hash"].shape == (len(PROMPT), 6)


def test_rows_that_end_no_entry_are_zero() -> None:
    reading = read_sequences(clean_model(), [PROMPT], patterns=["layers.2.attn.entries", "layers.5.attn.entries"])[0]
    pairs, singles = reading.tensors["layers.2.attn.entries"], reading.tensors["layers.5.attn.entries"]
    assert not pairs[::2].any()
    assert pairs[1::2].any(dim=1).all()
    assert singles.any(dim=1).all()


def test_steps_and_the_whole_sequence_give_the_same_tensors() -> None:
    stepwise = read_sequences(clean_model(), [PROMPT[:20]], given=[PROMPT[20:26]], patterns=DEFAULT_PATTERNS)[0]
    whole = read_sequences(clean_model(), [PROMPT[:25]], patterns=DEFAULT_PATTERNS)[0]
    for name, value in whole.tensors.items():
        if not name.startswith("mtp."):
            assert stepwise.tensors[name].shape == value.shape
            assert torch.allclose(stepwise.tensors[name].float(), value.float(), atol=1e-4), name


def fail_while_observing(model: Transformer) -> None:
    with observing(model, ALL):
        assert model.layers[0]._forward_hooks
        assert "_heads" in vars(model.layers[0].attn)
        raise RuntimeError("inside")


def test_the_model_is_as_before_when_the_context_ends() -> None:
    model = fresh_model()
    numerics = model.layers[0].attn.numerics
    with pytest.raises(RuntimeError, match="inside"):
        fail_while_observing(model)
    assert model.layers[0].attn.numerics is numerics
    for module in model.modules():
        assert not module._forward_hooks
        assert not {"_heads", "_rows", "_attend", "_publish_entries", "forward_groups"} & vars(module).keys()


def test_modules_that_no_pattern_concerns_are_left_alone() -> None:
    model = fresh_model()
    with observing(model, ["layers.3.ffn.gate.ids"]):
        hooked = [path for path, module in model.named_modules() if module._forward_hooks]
    assert hooked == ["layers.3.ffn.gate"]
