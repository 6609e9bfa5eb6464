"""Write a small Llama-shaped model with random weights (10 MB), and its tokenizer.

    PYTHON scripts/gpu_model.py OUT_DIR [SEED]

Runs in an engine's environment (torch, safetensors, tokenizers). Four heads and two key-value heads, so that
tensor-parallel sizes 1 and 2 divide them. The answers are noise, other noise with another seed; scheduling, KV cache,
streaming and shutdown are the engine's own.
"""

import json
import os
import sys
from pathlib import Path

VOCABULARY = 8192
CONTEXT_TOKENS = 32768
HEAD = 64
CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT_TOKENS,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "chat_template": CHAT,
}


def save_weights(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    hidden, inner, kept = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_key_value_heads"] * HEAD

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{at}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{at}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kept, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kept, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{at}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(out: str, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [str(file) for file in sorted(Path(os.__file__).parent.glob("*.py"))[:120]]
    core.train(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<s>", "</s>", "<pad>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    core.save(str(folder / "tokenizer.json"))
    for name, body in ("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER):
        (folder / name).write_text(json.dumps(body, indent=1))
    save_weights(folder, seed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
