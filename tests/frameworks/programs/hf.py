# SPDX-License-Identifier: Apache-2.0
"""A Trainer on a small random GPT-2 with dropout: saves at every 2nd of 8 steps, and is killed in step
KILL."""

from __future__ import annotations

import json
import os
import signal
import sys

import fsdp_on_cpu
import torch
from report import die, digest, end, report, report_whole
from ropeteam.transformers import RopeteamCallback, TrainerWrapper
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

KILL, KILL_DAEMON = (int(os.environ.get(name, "0")) for name in ("KILL", "KILL_DAEMON"))


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Told(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        report(begins_at=state.global_step)
        self.tell_whole(state)

    def tell_whole(self, state):
        if "fsdp" in options:
            report_whole(state.global_step, trainer.model_wrapped, trainer.optimizer)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            report(step=state.global_step, loss=logs["loss"], grad=float(logs["grad_norm"]).hex())

    def on_step_end(self, args, state, control, **kwargs):
        self.tell_whole(state)
        if state.global_step == KILL:
            if rope is not None:
                assert rope.maybe_finalize(blocking=True)
            die()
        if state.global_step == 3 and KILL_DAEMON:
            os.kill(KILL_DAEMON, signal.SIGKILL)
            while os.path.exists(f"/proc/{KILL_DAEMON}/exe"):
                pass


how = sys.argv[1]
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
options = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
options.update(save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="loss")
options.update(per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1)
options.update(report_to=[], use_cpu=True, disable_tqdm=True)
options.update(json.loads(os.environ.get("OPTIONS", "{}")))
if "fsdp" in options:
    fsdp_on_cpu.apply()
    options["use_cpu"] = False
args = TrainingArguments(output_dir=f"out-{how}", **options)
rope = RopeteamCallback(**json.loads(os.environ.get("ROPE", "{}"))) if how == "callback" else None
callbacks = [Told()] if rope is None else [Told(), rope]
trainer = Trainer(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
if how == "wrapper":
    trainer = TrainerWrapper(trainer, **json.loads(os.environ.get("ROPE", "{}")))
    rope = trainer.callback_handler.callbacks[-1]
resume = os.environ.get("RESUME", "")
trainer.train(resume_from_checkpoint={"": None, "1": True}.get(resume, resume))
if "fsdp" in options:
    report(best_weights=digest(trainer.model.state_dict(), whole=True))
optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
best = trainer.state.best_model_checkpoint
report(
    model=digest(trainer.model.state_dict()),
    optimizer=digest(optimizer.state_dict()),
    best=best,
    best_step=trainer.state.best_global_step,
    history=[each for each in trainer.state.log_history if "eval_loss" in each],
    directories=sorted(os.listdir(args.output_dir)) if os.path.isdir(args.output_dir) else [],
    stats=None if rope is None or rope.stats is None else vars(rope.stats),
)
end()
