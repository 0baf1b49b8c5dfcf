"""Words of other trainers and of former versions, with what to type here: for messages and a page.

`scripts/reference.py` makes the table of docs/from-other-trainers.md of it. A word is compared in lower case,
without the dashes before it, with underscores: `--ckpt-path` and `ckpt_path=…` are `ckpt_path`.
"""

# What to type, and the words of others; a key stands with its value.
_SETTINGS: dict[str, str] = {
    "trainer train FILE.yaml": "config config_file cfg config_name",
    "--resume RUN": "ckpt_path resume_from resume_from_checkpoint restore auto_resume load_checkpoint",
    "model.pretrained=FILE": "initial_checkpoint pretrained pretrained_weights init_checkpoint",
    "--out DIR": "output_dir default_root_dir log_dir logdir save_dir work_dir exp_dir",
    "--gpus N": "devices num_gpus n_gpus gpu_ids",
    "--nproc-per-node N": "ranks ranks_per_node num_processes nproc",
    "--master-addr HOST": "master master_address",
    "--no-progress": "enable_progress_bar disable_tqdm no_progress_bar no_bar",
    "--fast-dev-run": "dry_run sanity_check smoke_test num_sanity_val_steps",
    "--profile": "profiler",
    "--task FILE": "trust",
    "device=cpu": "accelerator use_cpu no_cuda",
    "precision.mode=bf16": "precision bf16 amp mixed_precision amp_dtype torch_dtype autocast",
    "precision.mode=fp16": "fp16 half native_amp",
    "precision.mode=tf32": "tf32 allow_tf32",
    "compile.mode=default": "compile torchcompile torch_compile",
    "memory.checkpointing=blocks": "gradient_checkpointing grad_checkpointing activation_checkpointing",
    "parallel.strategy=fsdp": "fsdp deepspeed zero_stage",
    "parallel.strategy=ddp": "strategy distributed_backend ddp",
    "parallel.sync_batchnorm=true": "sync_bn",
    "model.name=NAME": "model arch architecture backbone model_name model_name_or_path",
    "model.freeze=[NAME]": "freeze_backbone freeze_layers",
    "model.lora.rank=8": "lora lora_r lora_rank use_peft",
    "optim.name=NAME": "opt optimizer optim",
    "optim.lr=0.001": "lr learning_rate base_lr max_lr",
    "optim.schedule=cosine": "sched scheduler lr_scheduler lr_scheduler_type lr_policy",
    "optim.warmup_steps=100": "warmup warmup_epochs warmup_ratio warmup_iters num_warmup_steps",
    "optim.weight_decay=0.01": "wd",
    "optim.max_grad_norm=1.0": "clip grad_clip clip_grad gradient_clip_val gradient_clipping max_norm",
    "epochs=N": "epochs num_epochs num_train_epochs max_epochs n_epochs",
    "max_steps=N": "max_windows max_iters num_steps train_steps total_steps iterations",
    "seed=N": "seed random_seed manual_seed",
    "data.path=DIR": "data_dir data_path dataset_dir data_root train_dir",
    "data.name=FORMAT": "dataset dataset_name dataset_type",
    "data.workers=N": "workers num_workers dataloader_num_workers",
    "data.global_batch_size=N": "batch_size train_batch_size total_batch_size",
    "data.micro_batch_size=N": "accumulation accumulate_grad_batches gradient_accumulation_steps "
    "grad_accum_steps per_device_train_batch_size micro_batch microbatch",
    "data.eval_batch_size=N": "per_device_eval_batch_size val_batch_size validation_batch_size",
    "data.limit=N": "limit_train_batches limit_val_batches overfit_batches max_train_samples",
    "data.augment=flip": "hflip augmentation",
    "regularization.label_smoothing=0.1": "smoothing label_smoothing_factor",
    "ema.decay=0.999": "model_ema model_ema_decay use_ema",
    "evaluation.every='N steps'": "eval_steps eval_every val_check_interval eval_strategy "
    "evaluation_strategy check_val_every_n_epoch",
    "evaluation.patience=N": "early_stopping early_stopping_patience patience",
    "checkpoint.every=N": "save_steps save_every save_strategy checkpoint_every ckpt_every",
    "checkpoint.keep=N": "save_total_limit save_top_k checkpoint_hist max_to_keep",
    "log.every=N": "logging_steps log_interval log_every_n_steps",
    "log.to=[jsonl, wandb]": "report_to logger wandb with_tracking track",
}
SETTING_WORDS = {word: here for here, words in _SETTINGS.items() for word in words.split()}
# What to type, and commands of others.
_COMMANDS: dict[str, str] = {
    "trainer train": "fit run resume tune pretrain finetune",
    "trainer evaluate": "validate test eval val",
    "trainer predict": "infer generate inference",
    "trainer runs": "list ls list_runs history experiments checkpoints",
    "trainer recipes": "models list_recipes configs config cp",
    "trainer report": "compare",
    "trainer job": "submit launch sbatch",
    "trainer doctor": "env info",
    "trainer --version": "version",
    "trainer --help": "help",
    "examples/links": "bench",
}
COMMAND_WORDS = {word: here for here, words in _COMMANDS.items() for word in words.split()}
# In place of a command's word alone.
_MORE = {
    "tune": "trainer train RECIPE data.micro_batch_size=auto",
    "resume": "trainer train --resume RUN",
    "checkpoints": "trainer runs RUN",
    "cp": "trainer recipes RECIPE > mine.yaml",
}
COMMAND_WORDS |= _MORE


def setting_meant(word: str) -> str:
    """What to type for a flag or key of others, `--ckpt-path` or `optim.learning_rate`; "" if unknown."""
    name = word.lstrip("-").lower().replace("-", "_")
    return SETTING_WORDS.get(name.rpartition(".")[2], "")


def command_meant(word: str) -> str:
    """What to type for another trainer's command; "" if unknown."""
    return COMMAND_WORDS.get(word.lower().replace("-", "_"), "")


def words_in_rows() -> str:
    """Rows of a Markdown table: what to type here, words of others."""
    rows = [(here, words) for here, words in (*_SETTINGS.items(), *_COMMANDS.items())]
    return "".join(
        f"| `{here}` | {', '.join(f'`{word}`' for word in words.split())} |\n" for here, words in rows
    )
