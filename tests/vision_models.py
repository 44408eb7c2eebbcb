"""Tiny vision-language models, and batches of two image prompts with several responses each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from families import randomise
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCABULARY = 97
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "attention_dropout": 0.0,
}
_CONFIGS: dict[str, dict[str, object]] = {
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "window_size": 28, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **_TEXT},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [28, 28],
            "patch_size": [7, 7],
        },
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
}
MODELS = tuple(_CONFIGS)
HYBRID = "qwen3_5"  # its text layers have a recurrent state
_CONFIGS[HYBRID] = {
    "text_config": {
        **_TEXT,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
    **_QWEN_IDS,
}
_QWEN = ("qwen2_5_vl", "qwen3_vl", HYBRID)
_FEATURES = 4  # tokens of an image in each of the models


def build(name: str, dtype: torch.dtype = torch.float64, *, attention: str = "sdpa", seed: int = 0) -> nn.Module:
    """A tiny model in training mode, every parameter random."""
    model = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[name](**_CONFIGS[name]), attn_implementation=attention
    )
    randomise(model, seed)
    return model.to(dtype).train()


@dataclass(frozen=True)
class ImageBatch:
    """Arguments of a model, and the tokens that count: ``[batch, sequence]`` bool."""

    inputs: dict[str, Tensor]
    tokens: Tensor

    def rows_of(self, output: Tensor) -> Tensor:
        return output[self.tokens]


def pixels_of(name: str, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The pixels of one image."""
    generator = torch.Generator().manual_seed(100 + number)
    patch = {"qwen2_5_vl": 2 * 3 * 14 * 14, "qwen3_vl": 2 * 3 * 16 * 16, HYBRID: 2 * 3 * 16 * 16}
    shape = (16, patch[name]) if name in _QWEN else (1, 3, 28, 28)
    return torch.randn(shape, generator=generator, dtype=dtype)


def image_batch(name: str, images: tuple[int, ...], *, side: str = "right", masked: bool = True) -> ImageBatch:
    """Rows of one image each: three prompt tokens, the image, five prompt tokens, a response of its own length.

    Args:
        name: of the model.
        images: number of each row's image; rows of one image have one prompt.
        side: where padding goes.
        masked: pass an attention mask; without one, rows are equally long.
    """
    generator = torch.Generator().manual_seed(3)
    before, after = (torch.randint(3, 80, (8, n), generator=generator) for n in (3, 5))
    rows = []
    for row, image in enumerate(images):
        features = torch.full((_FEATURES,), IMAGE)
        marked = torch.cat([torch.tensor([START]), features, torch.tensor([END])])
        response = torch.randint(3, 80, (4 + 3 * row % 7 if masked else 6,), generator=generator)
        rows.append(torch.cat([before[image // 2], marked, after[image // 2], response]))
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        first = 0 if side == "right" else width - len(row)
        ids[index, first : first + len(row)] = row
        mask[index, first : first + len(row)] = 1
    inputs = {"input_ids": ids, "pixel_values": torch.cat([pixels_of(name, image) for image in images])}
    if masked:
        inputs["attention_mask"] = mask
    if name in _QWEN:
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(rows))
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return ImageBatch(inputs, mask.bool())


def result_of(model: nn.Module, batch: ImageBatch) -> dict[str, Tensor]:
    """Logits at tokens and the gradient of every parameter, under a random loss."""
    model.zero_grad()
    logits = batch.rows_of(model(**batch.inputs, use_cache=False).logits)
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)
    (logits.log_softmax(-1) * weights).sum().backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return {"logits": logits.detach(), **gradients}
