"""What finds out how a workload's layers behave, and keeps what it has found for other processes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.gradients import Flows
from spindle_cli.analysis.pairs.find import PairVerdicts
from spindle_cli.analysis.splitting.independence import Independence
from spindle_cli.analysis.tracing.observe import Observer


class Finder:
    """Finds out how the layers of one workload behave in the mode (of training or of evaluation) that they
    are in; equal ones once. `memo`: what another process has found. `findings`: as `TaskGraph` has them.
    """

    def __init__(self, memo: AnalysisMemo | None = None) -> None:
        self.observer = Observer(memo)
        self.independence = Independence(self.observer)
        self.pairs = PairVerdicts(self.observer)
        self.flows = Flows(self.observer)
        self.findings: dict[Hashable, Any] = {}

    def to_memo(self) -> AnalysisMemo:
        """What others need not find again: the memo and more."""
        memo = AnalysisMemo(
            torch_version=torch.__version__,
            observed=self.observer.observed(),
            findings=self.independence.verdicts.findings(),
            mixes=self.independence.tried(),
            pairs=self.pairs.records(),
            flows=self.flows.records(),
        )
        return memo if self.observer.memo is None else self.observer.memo.with_more(memo)
