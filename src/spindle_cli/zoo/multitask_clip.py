"""Multitask-CLIP: contrastive tasks between pairs of six modalities, with ImageBind's encoders ("huge").

Every task encodes two modalities with no flow between them, then compares them. 1.20 billion parameters at
paper size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.imagebind import GridSpec, MotionSpec, Spec, TextSpec, make_encoder
from spindle_cli.zoo.layers import TP_PLANS, ContrastiveLoss, EncoderLayer
from spindle_cli.zoo.options import Size, check_option, choose_batch_sizes
from spindle_cli.zoo.synthetic import SyntheticDataset

# Widths, layers, heads and inputs of `imagebind_model.imagebind_huge` (facebookresearch/ImageBind). Tokens
# with the class token: vision 257, text 77, audio 229, thermal 197, depth 197, motion 251.
PAPER: dict[str, Spec] = {
    "vision": GridSpec(1280, 32, 16, channels=3, height=224, width_px=224, patch=14, stride=14),
    "text": TextSpec(1024, 24, 16, tokens=77, vocabulary=49408),
    "audio": GridSpec(768, 12, 12, channels=1, height=128, width_px=204, patch=16, stride=10),
    "thermal": GridSpec(768, 12, 12, channels=1, height=224, width_px=224, patch=16, stride=16),
    "depth": GridSpec(384, 12, 8, channels=1, height=224, width_px=224, patch=16, stride=16),
    "motion": MotionSpec(512, 6, 8, channels=6, samples=2000, kernel=8),
}
# The same proportions, small enough for a laptop's CPU.
LAPTOP: dict[str, Spec] = {
    "vision": GridSpec(96, 6, 4, channels=3, height=24, width_px=24, patch=4, stride=4),
    "text": TextSpec(64, 4, 4, tokens=16, vocabulary=512),
    "audio": GridSpec(64, 3, 4, channels=1, height=16, width_px=26, patch=6, stride=4),
    "thermal": GridSpec(64, 3, 4, channels=1, height=24, width_px=24, patch=6, stride=6),
    "depth": GridSpec(32, 3, 2, channels=1, height=24, width_px=24, patch=6, stride=6),
    "motion": MotionSpec(48, 2, 2, channels=6, samples=192, kernel=8),
}
SPECS: dict[Size, dict[str, Spec]] = {"paper": PAPER, "laptop": LAPTOP}
EMBEDDING: dict[Size, int] = {"paper": 1024, "laptop": 64}

# The first 4, 7 or 10 make the workload. The first four are published (facts of the paper), the others are
# ours.
PAIRS: tuple[tuple[str, str], ...] = (
    ("text", "audio"),
    ("vision", "depth"),
    ("audio", "thermal"),
    ("motion", "thermal"),
    ("vision", "text"),
    ("vision", "audio"),
    ("vision", "motion"),
    ("vision", "thermal"),
    ("text", "depth"),
    ("audio", "motion"),
)
# At paper size fitted to published times of the DeepSpeed baseline: docs/benchmarks/calibration.md.
BATCH_SIZES: dict[Size, dict[str, int]] = {
    "paper": {
        "text_audio": 96,
        "vision_depth": 1152,
        "audio_thermal": 96,
        "motion_thermal": 96,
        "vision_text": 32,
        "vision_audio": 32,
        "vision_motion": 32,
        "vision_thermal": 96,
        "text_depth": 96,
        "audio_motion": 96,
    },
    "laptop": {
        "text_audio": 32,
        "vision_depth": 16,
        "audio_thermal": 24,
        "motion_thermal": 16,
        "vision_text": 16,
        "vision_audio": 8,
        "vision_motion": 8,
        "vision_thermal": 8,
        "text_depth": 24,
        "audio_motion": 16,
    },
}


class PairTask(nn.Module):
    """Two modalities of the same thing belong together."""

    def __init__(self, first: nn.Module, second: nn.Module, names: tuple[str, str]) -> None:
        super().__init__()
        # The encoders carry their modality's name here too, so that parameters are called e.g.
        # "vision.blocks.0...".
        self.names = names
        self.add_module(names[0], first)
        self.add_module(names[1], second)
        self.loss = ContrastiveLoss()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Two batches of inputs -> scalar."""
        first_encoder, second_encoder = (self.get_submodule(name) for name in self.names)
        loss: Tensor = self.loss(first_encoder(first), second_encoder(second))
        return loss


def build(tasks: int = 4, size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """Contrastive tasks over shared encoders, on synthetic data.

    Args:
        tasks: 1 to 10; the paper has 4, 7 and 10.
        size: the paper's, or small enough for a laptop.
        batch_sizes: samples per iteration of some or all tasks; BATCH_SIZES for the others.

    Raises:
        WorkloadError: a number of tasks or a size that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("multitask_clip: size", size, tuple(SPECS))
    check_option("multitask_clip: tasks", tasks, range(1, len(PAIRS) + 1))
    pairs = PAIRS[:tasks]
    defaults = {f"{a}_{b}": BATCH_SIZES[size][f"{a}_{b}"] for a, b in pairs}
    sizes = choose_batch_sizes("multitask_clip", defaults, batch_sizes)
    specs = SPECS[size]
    used = [name for name in specs if any(name in pair for pair in pairs)]
    encoders = {name: make_encoder(specs[name], EMBEDDING[size]) for name in used}
    return Workload(
        name=f"clip-{tasks}" if size == "paper" else f"clip-{tasks}-{size}",
        tasks=[
            Task(
                name=f"{a}_{b}",
                module=PairTask(encoders[a], encoders[b], (a, b)),
                batch_size=sizes[f"{a}_{b}"],
                dataset=SyntheticDataset({"first": specs[a].field, "second": specs[b].field}),
            )
            for a, b in pairs
        ],
        operators=(EncoderLayer,),
        contrastive=(ContrastiveLoss,),
        tp_plans=TP_PLANS,
    )
