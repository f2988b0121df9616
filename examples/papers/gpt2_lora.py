"""GPT-2 with LoRA, as a classifier: the model of g2.toml."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification


def gpt2_lora(num_classes: int, rank: int = 64) -> nn.Module:
    base = AutoModelForSequenceClassification.from_pretrained("gpt2", num_labels=num_classes)
    base.config.pad_token_id = base.config.eos_token_id  # as the data has it
    adapters = LoraConfig(
        task_type="SEQ_CLS", r=rank, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return get_peft_model(base, adapters)
