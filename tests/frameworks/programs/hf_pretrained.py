# SPDX-License-Identifier: Apache-2.0
"""A Trainer on a small random model with tied weights and a tokenizer. The trained model's logits are written
to logits.pt."""

from __future__ import annotations

import sys

import torch
from report import end, report
from ropeteam.transformers import RopeteamCallback
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
if sys.argv[1] == "bert":
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config.update({"intermediate_size": 48, "max_position_embeddings": 16})
    model = BertForMaskedLM(config)
else:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
tokens = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    output_dir="out", max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2,
    per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
rope = RopeteamCallback()
trainer = Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[rope])
trainer.train()
report(committed=rope.stats.committed)
if args.process_index == 0:
    with torch.no_grad():
        torch.save((tokens, trainer.model.eval().cpu()(input_ids=tokens).logits), "logits.pt")
end()
