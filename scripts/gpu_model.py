"""Write a Llama-shaped model folder without weights, and its tokenizer, for engines started with dummy weights.

    PYTHON scripts/gpu_model.py OUT_DIR

Runs in an engine's environment (needs `tokenizers` alone). Four heads and two key-value heads, so that tensor-parallel
sizes 1 and 2 divide them. The answers are noise; scheduling, KV cache, streaming and shutdown are the engine's own.
"""

import json
import os
import sys
from pathlib import Path

VOCABULARY = 8192
CONTEXT_TOKENS = 32768
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


def main(out: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
