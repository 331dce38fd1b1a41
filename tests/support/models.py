"""Models for tests: tiny random checkpoints made by transformers, and the default model, loaded once."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.models.registry import LoadedModel, find_model, load
from engine.models.tokenizer import HfTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Three special tokens and the 256 bytes.
TINY_VOCAB_SIZE = 259


def write_tiny_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a byte, with a chat template; ids 0, 1 and 2 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_llama(folder: Path, **options: Any) -> Any:
    """Write a random Llama checkpoint with its tokenizer into ``folder``; returns transformers' model of it.

    Grouped queries (4 over 2) and odd sizes; weights large enough that the
    logits are far from uniform. Options are those of ``_tiny``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return _tiny(LlamaConfig, LlamaForCausalLM, folder, **options)


def tiny_qwen3(folder: Path, **options: Any) -> Any:
    """Likewise a Qwen3 checkpoint: norms of query and key heads, and a head size of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _tiny(Qwen3Config, Qwen3ForCausalLM, folder, **({"head_dim": 20} | options))


def tiny(name: str, folder: Path, **options: Any) -> Any:
    """Likewise a checkpoint of any kind, by the stem of its classes' names in transformers."""
    import transformers

    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(
        transformers, f"{name}LMHeadModel"
    )
    return _tiny(config_class, model_class, folder, **options)


def _tiny(
    config_class: Any,
    model_class: Any,
    folder: Path,
    *,
    seed: int = 0,
    shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Any:
    """``config`` overrides fields of ``config_class``."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
        "attn_implementation": "eager",
    } | config
    model = model_class(config_class(**settings)).eval()
    with torch.no_grad():  # transformers starts norms at one and biases at zero, which would hide mistakes
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    _cast_parameters(model, dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tiny_tokenizer(folder)
    _cast_parameters(model, torch.float32)
    return model


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: the buffers with the rotary frequencies keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@functools.cache
def default_model_folder() -> Path:
    """The default model in Hugging Face form, converted in the user's cache folder (slow the first time)."""
    return find_model(None)[1]


@functools.cache
def default_tokenizer() -> HfTokenizer:
    """The default model's tokenizer."""
    return HfTokenizer(default_model_folder())


@functools.cache
def default_model() -> LoadedModel:
    """The default model with a small KV pool (512 blocks of 16 tokens), one thread. It is shared."""
    return load(None, num_blocks=512, num_threads=1)


@functools.cache
def reference_model(folder: Path) -> Any:
    """transformers' ``LlamaForCausalLM`` over the same folder, float32, eager: what to compare with."""
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    return model.eval()


def reference_generate(folder: Path, prompt_token_ids: list[int], max_tokens: int) -> list[int]:
    """Greedy output of the reference model, the end token included where it comes."""
    prompt = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = reference_model(folder).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt_token_ids) :].tolist()
    return tokens
