"""What an interrupted profile has measured so far, beside the file that it will become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, write_json
from spindle_cli.profile.types import MeasuredLink, Noise, OpTiming, RuntimeOverhead


class PartialProfile(Artifact):
    """The results so far of measuring.

    `conditions`: hash of all that they depend on; `failed`: keys of the shares that did not fit the memory;
    `noise`: of a run that was refused for it.
    """

    KIND: ClassVar[str] = "profile-partial"

    schema_: Annotated[Literal["spindle.profile-partial/1"], Field(alias="schema")] = (
        "spindle.profile-partial/1"
    )
    conditions: str
    links: tuple[MeasuredLink, ...] | None = None
    optimizer_s_per_byte: float | None = None
    overhead: RuntimeOverhead | None = None
    timings: dict[str, OpTiming] = Field(default_factory=dict)
    failed: tuple[str, ...] = ()
    noise: Noise | None = None


class ResumeFile:
    """Keeps a `PartialProfile` on disk, written whole after every result, and removed when the profile is
    complete.

    Attributes:
        links, optimizer_s_per_byte, overhead, timings, failed, noise: results so far, as in `PartialProfile`.
        resumed: how many timings an earlier, interrupted run had left.
    """

    def __init__(self, out: Path, conditions: str, *, accepts_noise: bool = True) -> None:
        """Read what an earlier run left beside `out`, if it was made under the same conditions (their hash).

        `accepts_noise`: also what was refused for its noise.

        Raises:
            InputError: there is such a file, but it cannot be read.
        """
        self.path = out.with_name(out.name.removesuffix(".json") + ".partial.json")
        self._conditions = conditions
        earlier = self._read()
        if earlier.noise is not None and not accepts_noise:
            earlier = PartialProfile(conditions=conditions)
        self.links = earlier.links
        self.optimizer_s_per_byte = earlier.optimizer_s_per_byte
        self.overhead = earlier.overhead
        self.timings = dict(earlier.timings)
        self.failed = set(earlier.failed)
        self.noise = earlier.noise
        self.resumed = len(self.timings)

    def add_links(self, links: tuple[MeasuredLink, ...]) -> None:
        """Keep the links' measurement."""
        self.links = links
        self._write()

    def add_optimizer(self, s_per_byte: float) -> None:
        """Keep the time of the optimizer's step."""
        self.optimizer_s_per_byte = s_per_byte
        self._write()

    def add_overhead(self, overhead: RuntimeOverhead) -> None:
        """Keep what the runtime takes of a processor."""
        self.overhead = overhead
        self._write()

    def add_timing(self, key: str, timing: OpTiming) -> None:
        """Keep the times of one op on one share."""
        self.timings[key] = timing
        self._write()

    def add_failed(self, key: str) -> None:
        """Note that a share does not fit the device's memory."""
        self.failed.add(key)
        self._write()

    def add_noise(self, noise: Noise) -> None:
        """Note that the results so far were refused for their noise."""
        self.noise = noise
        self._write()

    def take(
        self, timings: Mapping[str, OpTiming], failed: set[str], links: tuple[MeasuredLink, ...] | None
    ) -> None:
        """Take another profile's results for what there is no result of yet."""
        self.timings = {**timings, **self.timings}
        self.failed |= failed
        self.links = self.links or links

    def remove(self) -> None:
        """Remove the file, as the profile is complete."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> PartialProfile:
        fresh = PartialProfile(conditions=self._conditions)
        if not self.path.exists():
            return fresh
        try:
            resumed = PartialProfile.read(self.path)
        except InputError as error:
            raise InputError(
                f"the rest of an interrupted profile cannot be used: {error.message}",
                hint=f"Remove {self.path} to start anew.",
            ) from error
        return resumed if resumed.conditions == self._conditions else fresh

    def _write(self) -> None:
        partial = PartialProfile(
            conditions=self._conditions,
            links=self.links,
            optimizer_s_per_byte=self.optimizer_s_per_byte,
            overhead=self.overhead,
            timings=self.timings,
            failed=tuple(sorted(self.failed)),
            noise=self.noise,
        )
        write_json(self.path, partial)
