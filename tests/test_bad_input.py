"""What cannot be done exactly: a clear error, or the original forward with a reason in the log and in `explain`.

Every test also checks that the model is left as it was: the classes of its modules, their attributes and its outputs.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from families import build, computed, errors, one_thread, padded, reference, rollout
from torch import Tensor, nn
from transformers import AutoModel, BloomConfig, MambaConfig, PreTrainedModel, T5Config
from transformers.models.llama import modeling_llama

import augtree_fx
from augtree_fx import CostModel, RewriteError

ALL_ATTENTION_FUNCTIONS = modeling_llama.ALL_ATTENTION_FUNCTIONS
BATCH = padded(rollout(2), "right")
IDS, MASK = BATCH.input_ids, BATCH.attention_mask
# A float64 model with float32 up-casts, see test_models.py.
FLOAT32 = 1e-5


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def shared(model: nn.Module, **options: object) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free(), **options)


def state_of(model: nn.Module) -> object:
    return model.get_decoder()._augtree_state


def look(model: nn.Module) -> list[tuple[type, list[str]]]:
    return [(type(module), list(vars(module))) for module in model.modules()]


@contextlib.contextmanager
def rejected(model: nn.Module, kind: type[Exception], text: str) -> Iterator[None]:
    """The block raises `kind` with `text`; the model's classes, attributes and parameters are what they were."""
    before, mode = look(model), model.training
    values = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(kind, match=text):
        yield
    assert look(model) == before
    assert model.training == mode
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))


def tiny(config: object) -> PreTrainedModel:
    return AutoModel.from_config(config).eval()


def test_a_module_that_is_no_transformers_model() -> None:
    model = nn.Linear(3, 3)
    with rejected(model, TypeError, "expected a transformers model, got Linear without a config"):
        augtree_fx.transform(model)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("which", ["bloom", "mamba"])
def test_a_model_without_a_site(which: str, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Bloom has biases of attention (ALiBi); mamba has no attention."""
    reason = {"bloom": "ALiBi biases", "mamba": "no layer has attention"}[which]
    config = {
        "bloom": BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
        "mamba": MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
    }[which]
    model = tiny(config)
    expected = model(IDS)[0]
    if strict:
        with rejected(model, RewriteError, f"{type(model).__name__} cannot be transformed, 1 refusals:\n.*{reason}"):
            augtree_fx.transform(model)
    else:
        before = look(model)
        assert augtree_fx.transform(model, strict=False) is model
        assert look(model) == before
        assert "left unchanged" in caplog.text and reason in caplog.text
    assert torch.equal(model(IDS)[0], expected)


def test_an_encoder_decoder_model() -> None:
    model = tiny(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
    with rejected(model, NotImplementedError, "T5Model is an encoder-decoder model"):
        augtree_fx.transform(model)


class CustomAttention(modeling_llama.LlamaAttention):
    """Attention of remote code: values are scaled, and subclasses may pass keywords that we do not know."""

    factor = 1.0
    extra: dict[str, object] = {}

    def forward(self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None, **_: object):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        out, _ = attend(self, q, k, self.factor * v, attention_mask, scaling=self.scaling, **self.extra)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class ForwardOverridden(CustomAttention):
    factor = 2.0
    forward = CustomAttention.forward  # its own: the class that defines the forward also has the factor


class AttributeOverridden(CustomAttention):
    factor = 2.0


class OtherKeyword(CustomAttention):
    extra = {"foo": 1}
    forward = CustomAttention.forward


class CustomStack(modeling_llama.LlamaModel):
    """A stack that builds attention modules of another class."""

    attention: type[nn.Module] = CustomAttention

    def __init__(self, config: object) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = self.attention(config, index)

    forward = modeling_llama.LlamaModel.forward


class KeywordStack(CustomStack):
    attention = OtherKeyword
    forward = modeling_llama.LlamaModel.forward


def with_stack(stack_class: type[nn.Module]) -> PreTrainedModel:
    model = build("llama", torch.float64)
    plain, model.model = model.model, stack_class(model.config).double()
    model.model.load_state_dict(plain.state_dict())
    return model.eval()


def test_an_unknown_attention_keyword() -> None:
    model = with_stack(KeywordStack)
    with rejected(model, RewriteError, r"layers\.0 \(LlamaDecoderLayer\): unknown keyword of the attention call: foo"):
        shared(model)


def test_attention_of_remote_code_is_shared() -> None:
    model = with_stack(CustomStack)
    expected = reference(model, BATCH)
    assert max(errors(computed(shared(model), BATCH), expected).values()) < FLOAT32
    assert state_of(model).num_shared == 1


@pytest.mark.parametrize("attention", [ForwardOverridden, AttributeOverridden])
@pytest.mark.parametrize("stack", [modeling_llama.LlamaModel, CustomStack])
def test_attention_that_was_replaced_is_what_is_captured(stack: type[nn.Module], attention: type[nn.Module]) -> None:
    """What the config builds is not what runs, once a module was replaced: refuse, or compute what it computes."""
    model = with_stack(stack)
    for index, layer in enumerate(model.model.layers):
        weights = layer.self_attn.state_dict()
        layer.self_attn = attention(model.config, index).double().eval()
        layer.self_attn.load_state_dict(weights)
    expected = reference(model, BATCH)
    with contextlib.suppress(RewriteError):
        shared(model)
    assert max(errors(computed(model, BATCH), expected).values()) < FLOAT32


@pytest.mark.parametrize("where", ["attention", "stack"])
def test_a_forward_patched_onto_an_instance_is_refused(where: str) -> None:
    """It hides that of any class, ours included; the hooks of accelerate alone are known to call it."""
    model = build("llama")
    module = model.model if where == "stack" else model.model.layers[1].self_attn
    original = module.forward
    module.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with rejected(model, RewriteError, "forward"):
        shared(model)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(in_place: bool) -> None:
    model = build("llama")
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with rejected(model, TypeError, "compiled already.*transform.*first"):
        augtree_fx.transform(model)


def test_an_unknown_kernel() -> None:
    model = build("llama")
    with rejected(model, ValueError, "kernel must be one of auto, .*reference.*, got 'flash9'"):
        augtree_fx.transform(model, kernel="flash9")


def test_a_kernel_that_cannot_run_here() -> None:
    model = shared(build("llama"), kernel="aten_flash")
    with rejected(model, NotImplementedError, "'aten_flash' cannot run this attention: it runs on CUDA"):
        model(IDS, attention_mask=MASK, use_cache=False)


def test_restoring_a_model_that_is_not_transformed() -> None:
    model = build("llama")
    with rejected(model, ValueError, "LlamaForCausalLM is not transformed"):
        augtree_fx.restore(model)
