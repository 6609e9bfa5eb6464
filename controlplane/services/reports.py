"""Reports of one provisioner, as often as it likes to send them: the newest is taken, at most one in each interval."""

from springtide.v1 import provisioner_pb2 as pb
from springtide.wire.provisioner import MAX_NODES

REPORT_GAP_S = 0.1
"""Between two reports that are taken: a change is seen at once, and a flood costs ten looks in a second."""


class NewestReport:
    """What a skipped report told of ended nodes is told by the one that is taken: all else is in the newest, too."""

    def __init__(self, gap_s: float = REPORT_GAP_S) -> None:
        self._gap_s = gap_s
        self._newest: pb.ProvisionerReport | None = None
        self._ended: dict[str, pb.ProvidedNode] = {}  # of skipped reports
        self._next_at: float | None = None

    def put(self, report: pb.ProvisionerReport) -> None:
        """Takes the place of one that waits."""
        if self._newest is not None:
            for node in self._newest.nodes:
                if node.phase == pb.PROVIDED_PHASE_ENDED and len(self._ended) < MAX_NODES:
                    self._ended[node.node_id] = node
        self._newest = report

    def due_in_s(self, now: float) -> float | None:
        """How long the one that waits has to wait; None: there is none."""
        if self._newest is None:
            return None
        return 0.0 if self._next_at is None else max(0.0, self._next_at - now)

    def take(self, now: float, *, at_once: bool = False) -> pb.ProvisionerReport | None:
        """The report that is due. `at_once`: the stream ends, or a new hello follows."""
        report, due_in_s = self._newest, self.due_in_s(now)
        if report is None or due_in_s is None or (due_in_s > 0 and not at_once):
            return None
        listed = {node.node_id for node in report.nodes}
        missing = [node for node_id, node in self._ended.items() if node_id not in listed]
        report.nodes.extend(missing[: max(0, MAX_NODES - len(report.nodes))])
        self._newest, self._ended, self._next_at = None, {}, now + self._gap_s
        return report
