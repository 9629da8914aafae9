"""A real learning run on one GPU: 34M new parameters imitate careless teachers, then learn with GRPO, here and in TRL.

The cells `learn` and `learn-trl` of `python -m benchmarks.gpu`. Both start from the same imitated weights
(runs/gpu-learn/start, made by whichever comes first), see the same problems in the same order, and draw 32 × 16 answers
a step; TRL does the first 60 steps.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from panoply import api
from panoply.evaluation.held_out import evaluate
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.which import model_folder
from panoply.worlds.text.mixed import Mixed

FOLDER = Path("runs/gpu-learn")
SIZE: dict[str, Any] = {"width": 512, "layers": 8, "heads": 8, "kv_heads": 8, "inner": 2048, "tied": True}
PROMPTS, GROUP, RATE, HELD_OUT, SEED = 32, 16, 3e-5, 256, 0
COMMON: dict[str, Any] = {"held_out": HELD_OUT, "checkpoint_every": 10_000, "seed": SEED}


def start(steps: int = 400, size: dict[str, Any] = SIZE, **options: Any) -> tuple[Path, dict[str, Any]]:
    """The imitated model's folder and how it came about; made once."""
    facts = FOLDER / "start.json"
    if not facts.is_file():
        shutil.rmtree(FOLDER, ignore_errors=True)
        world = Mixed()
        policy = TextPolicy.fresh(DecoderConfig(world.tokenizer.vocab_size, **size), world.tokenizer)
        policy.save(FOLDER / "fresh")
        began = time.perf_counter()
        done = api.train(
            "sft", "mixed", run=FOLDER / "start", model=str(FOLDER / "fresh"), steps=steps, evaluate_every=0,
            settings={"update.lr": 5e-4}, **COMMON, **options,
        )  # fmt: skip
        spent = time.perf_counter() - began
        parameters = sum(p.numel() for p in policy.parameters())
        facts.write_text(
            json.dumps({"parameters": parameters, "imitation_s": spent, "imitated": dict(done.after)})
        )
    return model_folder(str(FOLDER / "start")), json.loads(facts.read_text())


def learn(steps: int = 200, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """GRPO on both worlds at once: the curve, step by step."""
    model, facts = start(dtype=dtype, **options)
    shutil.rmtree(FOLDER / "grpo", ignore_errors=True)
    began = time.perf_counter()
    done = api.train(
        "grpo", "mixed", run=FOLDER / "grpo", model=str(model), steps=steps, evaluate_every=20, dtype=dtype,
        settings={"update.lr": RATE, "sample.prompts": PROMPTS, "sample.group": GROUP}, **COMMON,
        **{k: v for k, v in options.items() if k == "device"},
    )  # fmt: skip
    lines = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "seconds", "success", "step0_gap", "tokens_per_second")
    curve = [{k: v for k, v in line.items() if k in kept or k.startswith("held_out")} for line in lines]
    spent = time.perf_counter() - began
    return {
        **facts,
        "dtype": dtype,
        "grpo_s": spent,
        "before": done.before,
        "after": done.after,
        "curve": curve,
    }


def learn_in_trl(steps: int = 60, **options: Any) -> dict[str, Any]:
    """TRL's GRPO from the same weights on the same problems, float32 weights under bf16 autocast (its default)."""
    import tempfile

    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    model, _ = start(dtype="bfloat16", **options)
    world, cuda = Mixed(), torch.cuda.is_available()
    policy = TextPolicy.load(model, device="cuda" if cuda else "cpu")
    tasks = Collector(world, policy, SEED).tasks(PROMPTS * steps)
    before = evaluate(world, policy, HELD_OUT, seed=SEED)
    seconds: list[float] = []
    successes: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        found = [world.grade(tasks[n], ids)["success"] for n, ids in zip(number, completion_ids, strict=True)]
        successes.append(sum(found) / len(found))
        return found

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=world.max_tokens, max_steps=steps, learning_rate=RATE, adam_beta2=0.95,
        lr_scheduler_type="constant_with_warmup", warmup_steps=10, max_grad_norm=1.0, weight_decay=0.0,
        temperature=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", scale_rewards="group",
        shuffle_dataset=False, gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda, logging_steps=1000,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=SEED,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": world.tokenizer.decode(list(t.prompt)), "number": i} for i, t in enumerate(tasks)]
        ),
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.to(torch.float32).save_pretrained(folder)
        world.tokenizer.save(folder)
        after = evaluate(world, TextPolicy.load(folder, device=policy.device), HELD_OUT, seed=SEED)
    curve = [
        {"step": i + 1, "seconds": s, "success": r}
        for i, (s, r) in enumerate(zip(seconds, successes, strict=True))
    ]
    return {"trl": trl.__version__, "before": before.to_json(), "after": after.to_json(), "curve": curve}
