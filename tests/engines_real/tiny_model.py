"""Write a tiny Llama with random weights, its tokenizer and a chat template: what a real engine loads at once.

    .venv-vllm/bin/python tests/engines_real/tiny_model.py OUT_DIR

Runs in the engine's environment (torch, transformers, tokenizers). The same arguments give the same files. Four heads,
so that tensor-parallel sizes 1, 2 and 4 divide them. Written to a folder beside OUT_DIR first, so that a half-made
model is never found.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

TEXTS = [
    "the control plane decides, the agents act, and the router streams",
    "a worker starts, warms up, serves, drains and rests",
    "hello world, what is the capital of France? Paris, of course.",
    "one two three four five six seven eight nine ten 0123456789",
    "{ } [ ] ( ) < > , . ; : ! ? ' \" / \\ | @ # $ % & * + - = _ ~",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT_TOKENS = 2048


def save_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """Train byte-level BPE on TEXTS; any input can be encoded. Returns the vocabulary's size and special token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return len(tokenizer), ids


def save_weights(folder: Path, vocabulary: int, ids: dict[str, int], layers: int, hidden: int, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-vocabulary // 16) * 16,  # tensor parallelism shards the vocabulary
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,  # large enough that greedy decoding does not repeat one token for ever
        **ids,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)


def make(out: Path, layers: int = 2, hidden: int = 128, seed: int = 0) -> Path:
    """Write the model to `out` unless it is there; returns `out`."""
    if (out / "config.json").exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        folder.chmod(0o755)
        vocabulary, ids = save_tokenizer(folder)
        save_weights(folder, vocabulary, ids, layers, hidden, seed)
        for file in folder.iterdir():
            file.chmod(0o644)  # the weights come out private to the user
        folder.rename(out)
    except OSError:
        if not (out / "config.json").exists():  # not just another process that was faster
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Llama model for engine tests.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="four heads of 32: the least for CPU attention")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(make(options.out, options.layers, options.hidden, options.seed))


if __name__ == "__main__":
    main()
