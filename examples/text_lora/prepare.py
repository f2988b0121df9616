"""Train the tokeniser and the base model on posts that no client holds, and write base/.

    FEDOPT_DATA=... python prepare.py [--steps 2000]

A language model of GPT-2's shape learns to continue the public half of the posts; no label is used.
About ten minutes of two cores. The head of the classifier is new and drawn by the run's seed.
"""

from __future__ import annotations

import argparse
import time

import torch
from text_lora import BASE, is_public, posts
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS, WINDOW, BATCH = 4096, 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    texts, _ = posts("train")
    public = [text for text, own in zip(texts, is_public(len(texts)), strict=True) if own]
    tokeniser = trained_tokeniser(public)
    tokens = torch.tensor([t for text in tokeniser(public)["input_ids"] for t in [*text, 1]])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=WINDOW,
            n_embd=128,
            n_layer=4,
            n_head=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            use_cache=False,
        )
    )
    train(model, tokens, steps)
    model.save_pretrained(BASE)
    tokeniser.save_pretrained(BASE)
    print(f"{BASE}: {sum(p.numel() for p in model.parameters()):,} parameters")


def trained_tokeniser(texts: list[str]) -> PreTrainedTokenizerFast:
    learned = ByteLevelBPETokenizer()
    special = ["<pad>", "<end>"]
    learned.train_from_iterator(texts, vocab_size=WORDS, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, pad_token="<pad>", eos_token="<end>"
    )


def train(model: GPT2LMHeadModel, tokens: Tensor, steps: int) -> None:
    """Continue random windows; AdamW with a warm-up and a linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, (steps - step) / steps)
    )
    draw = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH, 1), generator=draw)
        batch = tokens[starts + torch.arange(WINDOW)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
