"""The data of `digits`: handwritten images, names as text, and speech; split into samples to train on and
held-out ones.

Images: scikit-learn's 1,797 handwritten digits; every fifth is held out. Speech: `speech.npz` beside this
file (see scripts/make_speech_digits.py); held out are two voices never trained on and one at another speed.
Text: the names themselves.

Names are those of the digits 0 to 9 in sixteen languages, as written and as espeak-ng speaks them.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spindle_cli.errors import WorkloadError

IMAGE_SHAPE = (8, 8)
SPEECH_SHAPE = (40, 24)  # frames of 15 ms, mel bands
TEXT_BYTES = 24  # the longest name in UTF-8 fits; padded with byte 0
HELD_OUT_EVERY = 5
SPEECH_FILE = Path(__file__).with_name("speech.npz")


@dataclass(frozen=True)
class Clips:
    """Samples of one modality with the digit that each shows. `values`: [n, ...]; `digits`: int64 [n]."""

    values: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Split:
    """The three modalities of one split."""

    images: Clips  # float32 [n, 8, 8] in [-1, 1]
    speech: Clips  # float32 [n, 40, 24] in [-1, 1]
    texts: Clips  # int64 [160, 24]: bytes; every name in every language, the same in both splits


@cache
def load_split(held_out: bool) -> Split:
    """The samples to train on, or the held-out ones.

    Raises:
        WorkloadError: scikit-learn is not installed, or without its digits.
    """
    return Split(images=_images(held_out), speech=_speech(held_out), texts=_texts())


def _images(held_out: bool) -> Clips:
    with gzip.open(_images_file(), "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    rows = rows[(np.arange(len(rows)) % HELD_OUT_EVERY == 0) == held_out]
    images = torch.from_numpy(rows[:, :-1]).float().view(-1, *IMAGE_SHAPE) / 8 - 1
    return Clips(images, torch.from_numpy(rows[:, -1]).long())


def _images_file() -> Path:
    """What `sklearn.datasets.load_digits` reads. Importing it would take every worker 1.5 s at its start."""
    spec = find_spec("sklearn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    for folder in folders:
        if (path := Path(folder) / "datasets" / "data" / "digits.csv.gz").is_file():
            return path
    raise WorkloadError(
        "the workload `digits` takes its images from scikit-learn, which is not installed",
        hint="pip install 'spindle-cli[demo]'",
    )


def _speech(held_out: bool) -> Clips:
    with np.load(SPEECH_FILE) as file:
        chosen = file["held_out"] == held_out
        features, digits = file["features"][chosen], file["digits"][chosen]
    return Clips(torch.from_numpy(features).float() / 127.5 - 1, torch.from_numpy(digits).long())


def _texts() -> Clips:
    rows = [(encode(name), digit) for names in DIGIT_NAMES.values() for digit, name in enumerate(names)]
    return Clips(torch.stack([row for row, _ in rows]), torch.tensor([digit for _, digit in rows]))


def encode(name: str) -> Tensor:
    """A name as its UTF-8 bytes, int64 [TEXT_BYTES], padded with 0.

    Raises:
        ValueError: it is longer.
    """
    data = name.encode()
    if len(data) > TEXT_BYTES:
        raise ValueError(f"{name!r} has {len(data)} bytes; at most {TEXT_BYTES} fit")
    return torch.tensor(list(data.ljust(TEXT_BYTES, b"\0")))


class DigitPairs(Dataset[dict[str, Tensor]]):
    """Samples of one or more modalities that show the same digit, with that digit as `label`.

    Sample i takes item i (modulo their number) of the first modality; the others' items of that digit are
    drawn from i alone, so that a sample is the same wherever and whenever it is loaded.

    Args:
        modalities: 'image', 'text' or 'speech'; the first decides the digit.
        repeats: how often each item of the first modality occurs, with other partners each time.
    """

    def __init__(self, modalities: Sequence[str], *, held_out: bool = False, repeats: int = 1) -> None:
        self.modalities = tuple(modalities)
        self.held_out = held_out
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self._clips(self.modalities[0])) * self.repeats

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        first = self._clips(self.modalities[0])
        position = index % len(first)
        digit = int(first.digits[position])
        item = {self.modalities[0]: first.values[position], "label": first.digits[position]}
        for modality in self.modalities[1:]:
            partners = _items_of_digit(modality, self.held_out)[digit]
            drawn = zlib.crc32(f"{modality} {index}".encode()) % len(partners)
            item[modality] = self._clips(modality).values[partners[drawn]]
        return item

    def _clips(self, modality: str) -> Clips:
        return _clips_of(modality, load_split(self.held_out))


def _clips_of(modality: str, split: Split) -> Clips:
    return {"image": split.images, "text": split.texts, "speech": split.speech}[modality]


@cache
def _items_of_digit(modality: str, held_out: bool) -> tuple[Tensor, ...]:
    """Indices of a modality's items that show each digit."""
    digits = _clips_of(modality, load_split(held_out)).digits
    return tuple(torch.nonzero(digits == digit).flatten() for digit in range(10))


# Key: espeak-ng's voice name of the language.
DIGIT_NAMES: dict[str, tuple[str, ...]] = {
    "en-gb": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "de": ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
    "nl": ("nul", "een", "twee", "drie", "vier", "vijf", "zes", "zeven", "acht", "negen"),
    "sv": ("noll", "ett", "två", "tre", "fyra", "fem", "sex", "sju", "åtta", "nio"),
    "fr-fr": ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
    "es": ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"),
    "it": ("zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove"),
    "pt": ("zero", "um", "dois", "três", "quatro", "cinco", "seis", "sete", "oito", "nove"),
    "pl": ("zero", "jeden", "dwa", "trzy", "cztery", "pięć", "sześć", "siedem", "osiem", "dziewięć"),
    "cs": ("nula", "jedna", "dva", "tři", "čtyři", "pět", "šest", "sedm", "osm", "devět"),
    "ru": ("ноль", "один", "два", "три", "четыре", "пять", "шесть", "семь", "восемь", "девять"),
    "el": ("μηδέν", "ένα", "δύο", "τρία", "τέσσερα", "πέντε", "έξι", "επτά", "οκτώ", "εννέα"),
    "tr": ("sıfır", "bir", "iki", "üç", "dört", "beş", "altı", "yedi", "sekiz", "dokuz"),
    "fi": (
        "nolla",
        "yksi",
        "kaksi",
        "kolme",
        "neljä",
        "viisi",
        "kuusi",
        "seitsemän",
        "kahdeksan",
        "yhdeksän",
    ),
    "sw": ("sifuri", "moja", "mbili", "tatu", "nne", "tano", "sita", "saba", "nane", "tisa"),
    "hi": ("शून्य", "एक", "दो", "तीन", "चार", "पाँच", "छह", "सात", "आठ", "नौ"),
}
LANGUAGES: tuple[str, ...] = tuple(DIGIT_NAMES)
