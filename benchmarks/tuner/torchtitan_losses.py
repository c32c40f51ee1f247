"""Trains torchtitan's debug model with its own layers and with ours, on CPU ranks, and compares the losses.

    ./launch.sh --nproc 2 -m benchmarks.tuner.torchtitan_losses [--steps 3]

It needs `pip install torchtitan==0.3.0`, and no GPU. torchtitan runs as it is, but for what a CPU lacks:
facts about a device's memory, FlexAttention's backward pass, and with torch 2.13 `set_timeout`. Its backend
of DTensors (partial_dtensor), one layer, 16 tokens, float32.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

TOLERANCE = 1e-5  # of a loss, relative: products are summed in another order
WORDS = [f"w{number}" for number in range(64)]


def pretend_a_device() -> None:
    """Give torchtitan a device named "cpu", before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    facts = types.SimpleNamespace(total_memory=1 << 34)
    for name, value in {
        "get_device_name": "CPU",
        "get_device_properties": facts,
        "reset_peak_memory_stats": None,
        "current_device": 0,
        "empty_cache": None,
        "memory_stats": {},
        "device_count": 8,
    }.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None


def write_assets(directory: Path) -> None:
    """Write a tokenizer of a few words, and texts of them, where torchtitan looks for its test data."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    data = directory / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    texts = [" ".join(WORDS[(line * 7 + i * i) % 64] for i in range(60)) for line in range(40)]
    (data / "data.json").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))


def attend(
    self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any
) -> Any:
    """Attention in place of FlexAttention's, which has no backward pass on CPUs."""
    heads = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return attended.transpose(1, 2)


def train(directory: Path, steps: int, overrides: list[str]) -> list[float]:
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.hf_assets_path, config.dump_folder = str(directory), str(directory / "out")
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = dist.get_world_size()
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 1, 16, steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    config.validator.enable = config.checkpoint.enable = False
    config.activation_checkpoint, config.debug.seed = None, 7
    config.override.imports = overrides
    trainer, losses = config.build(), []
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, *given: Any, **named: Any) -> None:
        losses.append(loss)
        log(step, loss, *given, **named)

    trainer.metrics_processor.log = note
    trainer.train()
    trainer.close()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="of training, each way")
    steps = parser.parse_args().steps
    pretend_a_device()
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the group
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.forward = attend
    with tempfile.TemporaryDirectory() as name:
        write_assets(Path(name))
        os.chdir(name)
        stock = train(Path(name), steps, [])
        ours = ["dist_autotune.torchtitan." + each for each in ("feed_forward", "attention", "tuned_steps")]
        overlapped = train(Path(name), steps, ours)
        worst = max(abs(own / other - 1) for own, other in zip(overlapped, stock, strict=True))
        if dist.get_rank() == 0:
            print(f"losses of torchtitan {stock}, with our layers {overlapped}: at most {worst:.1e} apart")
        os.chdir("/")
    if not worst <= TOLERANCE:
        raise SystemExit("the losses differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
