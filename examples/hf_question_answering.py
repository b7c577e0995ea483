# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering with Hugging Face's Trainer, from random weights: a small version of
SkyPilot's BERT example, with its checkpoints in the nodes' memory.

    ropeteam run --memory 1G -- torchrun --nproc-per-node 2 examples/hf_question_answering.py --output_dir out

If it is killed and run again, it continues from the newest step. The arguments are those of
TrainingArguments. The contexts are random words with two marks; the answer is the words between them.
"""

import sys

import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ropeteam.transformers import RopeteamCallback

WORDS, MARK, LENGTH = 64, 1, 24


class Questions(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.words = torch.randint(2, WORDS, (count, LENGTH), generator=random)
        self.starts = torch.randint(1, LENGTH - 6, (count,), generator=random)
        self.ends = self.starts + torch.randint(0, 4, (count,), generator=random)
        rows = torch.arange(count)
        self.words[rows, self.starts - 1] = MARK
        self.words[rows, self.ends + 1] = MARK

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict:
        answer = {"start_positions": self.starts[index], "end_positions": self.ends[index]}
        return {
            "input_ids": self.words[index],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            **answer,
        }


def exact(prediction) -> dict:
    """How many answers are right from the first word to the last."""
    (starts, ends), (true_starts, true_ends) = prediction.predictions, prediction.label_ids
    right = (starts.argmax(-1) == true_starts) & (ends.argmax(-1) == true_ends)
    return {"exact_match": float(right.mean())}


defaults = [
    "--save_steps",
    "20",
    "--save_total_limit",
    "10",
    "--learning_rate",
    "3e-3",
    "--report_to",
    "none",
]
defaults += ["--per_device_train_batch_size", "16", "--eval_strategy", "epoch", "--num_train_epochs", "3"]
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*defaults, *sys.argv[1:]])
args.label_names = ["start_positions", "end_positions"]
set_seed(args.seed)
sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
model = BertForQuestionAnswering(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Questions(1024, seed=1),
    eval_dataset=Questions(128, seed=2),
    compute_metrics=exact,
    callbacks=[RopeteamCallback(memory_every=5)],
)
trainer.train(resume_from_checkpoint=True)
print(f"rank {args.process_index}: {trainer.state.global_step} steps,", trainer.evaluate())
trainer.save_model()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
