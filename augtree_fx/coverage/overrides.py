"""Sizes of tiny configs by field name, and the few types whose config needs more than those."""

from __future__ import annotations

from typing import Any

# Small values of fields by name; a field that is smaller by default, 0 or None, keeps its default.
SIZES: dict[str, int] = {
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "pronunciation_vocab_size": 97,
    "shape_vocab_size": 97,
    "max_position_embeddings": 256,
    "max_source_positions": 64,
    "max_target_positions": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "model_max_length": 256,
    "context_length": 256,
    "unpadded_vocab_size": 97,
    "word_embed_proj_dim": 64,
    # positions from which on logits are scaled
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    # widths
    "hidden_size": 64,
    "d_model": 64,
    "hidden_size_global": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "pronunciation_embed_dim": 32,
    "shape_embed_dim": 32,
    "lru_width": 64,
    "hidden_size_per_layer_input": 16,
    "ple_embed_dim": 16,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "dim_ff": 64,
    "dff": 64,
    "d_inner": 64,
    "feed_forward_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "prompt_mid_dim": 32,
    "router_hidden_size": 32,
    # layers
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_blocks": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_layers_per_stack": 2,
    "num_nextn_predict_layers": 0,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_attention_heads_per_layer": 4,
    "num_query_groups": 4,
    "head_dim": 16,
    "swa_head_dim": 16,
    "dim_head": 16,
    "d_head": 16,
    "kv_channels": 16,
    "attention_head_size": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 6,
    "query_pre_attn_scalar": 16,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "zero_expert_num": 2,
    "first_k_dense_replace": 1,
    # recurrent and linear layers
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    # low-rank parts
    "hc_lowrank": 8,
    "laurel_rank": 8,
    "adapter_rank": 8,
    "gated_norm_rank": 8,
    "loop_gate_rank": 8,
    "rel_extent": 32,
    "d_rel": 8,
}
# Numbers of key heads: 2 for grouped queries, as many as queries where the default has so, 1 for one.
KEY_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
# Tokens that a layer sees; below the length of the batch's prompts, so that they bite.
WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "keep_window_size",
    "local_attention",
    "local_attention_window_len",
    "attention_chunk_size",
)
WINDOW = 8
# Values of fields that some types leave unset but need.
UNSET = {"head_dim": 16, "num_key_value_heads": 4}
# Lists with one item a layer that do not decide what kind of layer it is.
NO_KIND = ("layer_rope_theta",)

_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 32}  # heads x size = expansion 2 x hidden size 64
# By default without the windows that published models of these types have.
_WINDOW_AND_FULL = ["sliding_attention", "full_attention"]
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_LLAMA_4 = {  # each of its lists names layers of the default depth
    "num_hidden_layers": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "floor_scale": 4,  # queries are scaled by their column
}
_QWEN_4 = {  # the default leaves its indexer unset
    "head_dim": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_GEMMA_3N = {  # the last layers take keys and values of the last one of their kind that has some
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": [64] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_DOTS_3 = {  # sliding layers have sizes of their own
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
# Fields to set as they are, by type; a dict at the name of a sub-config holds fields of that.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {  # its default rope parameters lack the kinds of its layers, and fit heads of 128
        "layer_types": _WINDOW_AND_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]} for kind in _WINDOW_AND_FULL
        },
    },
    "dbrx": {  # no default theta; with one expert a token its router has no gradient
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},  # no default
    "deepseek_v4": {  # shorter than the rows, or nothing is compressed
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 1},
    "dots3_note": {
        "text_config": {**_DOTS_3, "hidden_size": 64},
        "vision_config": {"hidden_size": 64, "num_attention_heads": 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"hidden_size": 64, "num_attention_heads": 4, "adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS_3,
    "flint": {"mlp_only_layers": [0]},
    "gemma3n": {"text_config": _GEMMA_3N},
    "gemma3n_text": _GEMMA_3N,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {}},  # transformers 5.17 has none by default
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA_2, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},  # with one expert a token its router has no gradient
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _WINDOW_AND_FULL},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},  # by default without convolutions
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": _LLAMA_4},
    "llama4_text": _LLAMA_4,
    "longcat_flash": {"head_dim": 8},  # size of its rotary part
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mellum": {"layer_types": _WINDOW_AND_FULL},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "musicgen": {"num_codebooks": 1},  # codebooks are rows of the batch: one, as text has
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "qwen2": _QWEN_WINDOW,
    "qwen3": _QWEN_WINDOW,
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "recurrent_gemma": {"num_hidden_layers": 3},  # period of recurrent, recurrent, attention
    "reformer": {  # axial positions fix the length of a batch
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {  # ties its shared blocks, so it needs two
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
# Sub-config that the class is built from, where that is not the whole config.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
# Types that cannot run on token ids alone, and why.
NOT_FROM_TOKENS = dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "it drafts for another model, from that model's hidden states and keys; it takes no input_ids",
)
