"""Which island a worker is of, and the run as this island sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, island_dir, journal_path
from spindle_cli.process.environment import WorkerEnvironment


@dataclass(frozen=True)
class Island:
    """A worker's place among islands, which have equally many workers, in the order of their ranks.

    Attributes:
        number: of the island; `count`: of all.
        rank: of the worker in it.
        size: workers of each.
        run_dir: the folder of the whole run.
    """

    number: int
    count: int
    rank: int
    size: int
    run_dir: Path

    @classmethod
    def of(cls, request: RunRequest, environment: WorkerEnvironment) -> Island | None:
        """Finds the island of this worker; None where all workers train one model.

        Raises:
            InputError: there is no equal number of workers for each island.
        """
        count = request.islands
        if count == 1:
            return None
        if environment.world_size % count:
            raise InputError(
                f"{request.plan}: {environment.world_size} workers were started for {count} islands; "
                "expected as many for each",
                hint="Start it with `spindle launch`, which starts one worker per device.",
            )
        size = environment.world_size // count
        number, rank = divmod(environment.rank, size)
        return cls(number, count, rank, size, request.run_dir)

    @property
    def rank_among_all(self) -> int:
        """The worker's rank among those of all islands."""
        return self.number * self.size + self.rank

    @property
    def journal(self) -> Path:
        """The worker's, where the launcher looks for it."""
        return journal_path(self.run_dir, self.rank_among_all)

    def request_of(self, request: RunRequest) -> RunRequest:
        """The request as the island's own: what it writes goes to its own folder, which this makes.

        Islands but the first save a checkpoint before it does, and keep one more: of whichever step the first
        one has a whole checkpoint, all have.

        Raises:
            InputError: the folder cannot be made.
        """
        island_folder = island_dir(request.run_dir, self.number)
        capture_dir = None if request.capture_dir is None else island_folder / request.capture_dir.name
        try:
            for folder in (island_folder, capture_dir):
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{island_folder}: cannot be made: {error.strerror}") from error
        return request.model_copy(
            update={
                "island": self.number,
                "run_dir": island_folder,
                "capture_dir": capture_dir,
                "keep": request.keep + (self.number > 0),
            }
        )

    def environment_of(self, environment: WorkerEnvironment) -> WorkerEnvironment:
        """The worker's among those of its island. A node may have workers of several islands, where a machine
        stands in for all nodes: then its first rank is the island's.
        """
        first_of_node = max(0, self.rank - environment.local_rank)
        return replace(
            environment,
            rank=self.rank,
            world_size=self.size,
            local_rank=self.rank - first_of_node,
        )
