"""What a report may say about a worker. An older incarnation or generation moves nothing, but an end is an end."""

from springtide.model.enums import ReportedPhase
from springtide.model.worker import Worker, WorkerReport

ENDED: frozenset[ReportedPhase] = frozenset({ReportedPhase.STOPPED, ReportedPhase.FAILED})


def has_ended(report: WorkerReport) -> bool:
    """The node says that the process is gone and its memory free."""
    return report.phase in ENDED


def is_current(worker: Worker, report: WorkerReport) -> bool:
    """The report is about this incarnation or a newer one, and the node has acted on the current generation."""
    return report.incarnation >= worker.observed.incarnation and report.generation >= worker.intent.generation


def tells_end(worker: Worker, report: WorkerReport) -> bool:
    """The report says that the engine we mean has ended. An end may be learned from an older generation; but while
    nothing has been heard of the engine of this start, an older end is that of the engine before it."""
    if not has_ended(report):
        return False
    if report.generation >= worker.intent.generation or report.incarnation > worker.observed.incarnation:
        return True
    return worker.observed.phase is not None and report.incarnation == worker.observed.incarnation
