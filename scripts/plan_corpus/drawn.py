"""Tasks drawn at random, of the kinds that people train together; a kind, a seed and a number of tasks give
the same ones everywhere. And the ten tasks on 64 devices that are hard to plan where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from plan_corpus.tasks import Part, TaskWork

# By modality: width, tokens and layers of its encoder.
ENCODERS = {
    "text": (768, 77, 12),
    "vision": (1024, 257, 24),
    "audio": (768, 229, 12),
    "depth": (384, 197, 12),
    "thermal": (768, 197, 12),
    "motion": (512, 391, 6),
}
WORDS = 32_000

TEN_TASKS = """
t0 100: c0 768x197 39; c1 384x577 3; c2 384x1024 26 < c1 c0
t1 8: c0 384x197 6; c1 2048x64 36 < c0
t2 60: c0 768x197 20; c1 384x64 20 < c0; c2 1024x64 5 < c1 c0; c3 2048x197 14 < c2 c0
t3 128: c0 2048x197 26; c1 1024x197 23; c2 768x577 40 < c0; c3 384x197 29 < c0 c2; c4 1024x1024 10 < c2; c5 2048x197 33 < c2 c0
t4 128: c0 384x577 40; c1 384x64 39 < c0
t5 60: c0 2048x64 24; c1 384x64 38; c2 2048x577 24 < c1; c3 384x577 3; c4 2048x64 29 < c1; c5 1024x64 2
t6 8: c0 1024x64 39; c1 768x64 38 < c0; c2 1024x197 29 < c0
t7 24: c0 1024x197 15; c1 384x577 30 < c0
t8 60: c0 1024x197 3; c1 1024x197 17 < c0; c2 1024x577 1 < c1
t9 60: c0 2048x1024 16; c1 768x197 10; c2 768x1024 8; c3 1024x1024 14 < c2; c4 2048x577 20 < c2; c5 768x197 10 < c2
"""  # noqa: E501 - a line for each task


def read_tasks(text: str) -> tuple[TaskWork, ...]:
    """Tasks as lines: 'name batch: component WIDTHxTOKENS LAYERS < inputs; ...'."""
    return tuple(map(_read_task, text.strip().splitlines()))


def _read_task(line: str) -> TaskWork:
    head, _, body = line.partition(":")
    name, batch = head.split()
    return TaskWork(name, int(batch), tuple(map(_read_part, body.split(";"))))


def _read_part(text: str) -> Part:
    layers, _, inputs = text.partition("<")
    component, size, ops = layers.split()
    width, tokens = size.split("x")
    return Part(component, int(width), int(tokens), int(ops), tuple(inputs.split()))


def drawn_tasks(kind: str, seed: int, count: int, scale: int = 1) -> tuple[TaskWork, ...]:
    """So many tasks of one of `KINDS`, their batches `scale` times as large."""
    random = Random(f"{kind}-{seed}")  # noqa: S311 - reproducible, not secret
    return KINDS[kind](random, count, scale)


def _graphs(random: Random, count: int, scale: int) -> tuple[TaskWork, ...]:
    """Random graphs over six components that tasks share."""
    sizes = [(random.choice((384, 768, 1024, 2048)), random.randrange(1, 41)) for _ in range(6)]
    tasks = []
    for number in range(count):
        batch = random.choice((8, 24, 60, 100, 128)) * scale
        used = sorted(random.sample(range(6), random.randrange(2, 7)))
        parts: list[Part] = []
        for component in used:
            width, ops = sizes[component]
            earlier = [part.component for part in parts]
            inputs = random.sample(earlier, min(len(earlier), random.randrange(3)))
            tokens = random.choice((64, 197, 577, 1024))
            parts.append(Part(f"c{component}", width, tokens, ops, tuple(inputs)))
        tasks.append(TaskWork(f"t{number}", batch, tuple(parts)))
    return tuple(tasks)


def _contrastive(random: Random, count: int, scale: int) -> tuple[TaskWork, ...]:
    """Pairs of encoders whose outputs a loss compares over the whole batch."""
    tasks = []
    for number in range(count):
        first, second = (_encoder(name) for name in random.sample(sorted(ENCODERS), 2))
        batch = random.choice((64, 96, 192, 256, 480)) * scale
        loss = Part("loss", 0, 1, 1, (first.component, second.component), is_loss=True)
        tasks.append(TaskWork(f"t{number}", batch, (first, second, loss)))
    return tuple(tasks)


def _encoder_decoders(random: Random, count: int, scale: int) -> tuple[TaskWork, ...]:
    """Encoders, each before the decoder that all tasks share, every layer of which takes their output."""
    tasks = []
    for number in range(count):
        encoder = _encoder(random.choice(sorted(ENCODERS)))
        tokens = random.choice((32, 64, 128, 256))
        decoder = Part("decoder", 1024, tokens, 12, (encoder.component,), is_decoder=True, words=WORDS)
        tasks.append(
            TaskWork(f"t{number}", random.choice((32, 48, 90, 128, 200)) * scale, (encoder, decoder))
        )
    return tuple(tasks)


def _language(random: Random, count: int, scale: int, experts: int = 0) -> tuple[TaskWork, ...]:
    """Tasks of one or two encoders around one language model."""
    tasks = []
    for number in range(count):
        encoders = [_encoder(name) for name in random.sample(sorted(ENCODERS), random.randrange(1, 3))]
        inputs = tuple(encoder.component for encoder in encoders)
        tokens = random.choice((256, 512, 1024))
        model = Part("language", 2048, tokens, 24, inputs, words=WORDS, experts=experts)
        tasks.append(TaskWork(f"t{number}", random.choice((16, 24, 32, 60, 64)) * scale, (*encoders, model)))
    return tuple(tasks)


def _experts(random: Random, count: int, scale: int) -> tuple[TaskWork, ...]:
    """The same around a language model with experts."""
    return _language(random, count, scale, experts=8)


def _encoder(modality: str) -> Part:
    width, tokens, ops = ENCODERS[modality]
    return Part(modality, width, tokens, ops)


KINDS: dict[str, Callable[[Random, int, int], tuple[TaskWork, ...]]] = {
    "graphs": _graphs,
    "contrastive": _contrastive,
    "encoder-decoders": _encoder_decoders,
    "language": _language,
    "experts": _experts,
}
