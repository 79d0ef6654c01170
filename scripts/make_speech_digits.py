"""Make the speech of the `digits` workload: each digit's name in each language by espeak-ng, as log-mel
features.

    apt-get install espeak-ng
    python scripts/make_speech_digits.py

writes src/spindle_cli/zoo/digits/speech.npz (under 2 MB). The same espeak-ng gives the same file. Needs numpy
only.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from spindle_cli.zoo.digits.data import DIGIT_NAMES, LANGUAGES

OUTPUT = Path(__file__).resolve().parent.parent / "src/spindle_cli/zoo/digits/speech.npz"
RATE = 22050  # Hz, espeak-ng's output
WINDOW, HOP = 512, 330  # samples: 23 ms windows every 15 ms
NUM_MELS, NUM_FRAMES = 24, 40  # 0.6 s, longer than 19 of 20 clips
LOWEST_HZ, HIGHEST_HZ = 80.0, 8000.0
DYNAMIC_RANGE = 10.0  # nats below the loudest bin that still count; 255 is the loudest, 0 is silence


@dataclass(frozen=True)
class Take:
    """One way to speak: espeak-ng's voice variant, words per minute and pitch (0 to 99)."""

    variant: str
    speed: int
    pitch: int
    held_out: bool


def takes() -> Iterator[Take]:
    """Eight takes to train on; held out: two voices never trained on, and one at a new speed and pitch."""
    for (variant, pitch), speed in product([("m1", 45), ("m3", 30), ("f1", 55), ("f4", 70)], [140, 190]):
        yield Take(variant, speed, pitch, held_out=False)
    yield Take("m7", 170, 40, held_out=True)
    yield Take("f2", 170, 60, held_out=True)
    yield Take("f1", 210, 45, held_out=True)


def speak(text: str, language: str, take: Take) -> np.ndarray:
    """The spoken text as samples in [-1, 1], [n]."""
    program = shutil.which("espeak-ng")
    if program is None:
        sys.exit("espeak-ng is not installed: apt-get install espeak-ng")
    voice = f"{language}+{take.variant}"
    command = [program, "-v", voice, "-s", str(take.speed), "-p", str(take.pitch), "--stdout", text]
    spoken = subprocess.run(command, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(spoken)) as sound:
        if sound.getframerate() != RATE:
            sys.exit(f"espeak-ng spoke at {sound.getframerate()} Hz; expected {RATE}")
        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype=np.int16)
    return samples.astype(np.float64) / 2**15


def mel_filters() -> np.ndarray:
    """Triangular filters evenly spaced on the mel scale, [NUM_MELS, WINDOW // 2 + 1]."""
    lowest, highest = (2595 * np.log10(1 + hz / 700) for hz in (LOWEST_HZ, HIGHEST_HZ))
    edges = 700 * (10 ** (np.linspace(lowest, highest, NUM_MELS + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(WINDOW, 1 / RATE)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - low) / (centre - low)
    falling = (high - frequencies) / (high - centre)
    return np.clip(np.minimum(rising, falling), 0, None)


def log_mel(samples: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Log-mel features from the first sound on, uint8 [NUM_FRAMES, NUM_MELS]; cut or padded with silence."""
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
    samples = np.pad(samples[loud[0] : loud[-1] + 1], (0, WINDOW + NUM_FRAMES * HOP))
    starts = HOP * np.arange(NUM_FRAMES)
    frames = samples[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames)) ** 2 @ filters.T
    level = np.log(power + 1e-12)
    scaled = 1 + (level - level.max()) / DYNAMIC_RANGE
    image: np.ndarray = np.round(255 * np.clip(scaled, 0, 1)).astype(np.uint8)
    return image


def main() -> None:
    """Speak every name in every take and write the features with their digit, language, take and split."""
    filters = mel_filters()
    rows = [
        (
            log_mel(speak(DIGIT_NAMES[language][digit], language, take), filters),
            digit,
            number,
            index,
            take.held_out,
        )
        for number, language in enumerate(LANGUAGES)
        for digit in range(10)
        for index, take in enumerate(takes())
    ]
    features, digits, languages, take_numbers, held_out = zip(*rows, strict=True)
    np.savez_compressed(
        OUTPUT,
        features=np.stack(features),  # uint8 [clips, NUM_FRAMES, NUM_MELS]
        digits=np.array(digits, dtype=np.uint8),
        languages=np.array(languages, dtype=np.uint8),  # index into LANGUAGES
        takes=np.array(take_numbers, dtype=np.uint8),
        held_out=np.array(held_out),
    )
    print(f"{OUTPUT.name}: {len(rows)} clips, {OUTPUT.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
