"""What Prometheus sees of links: the same families for a router and for an agent, which shows those of its shims."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from springtide.link.counts import Seen


class LinkFamilies:
    """`prefix`: of the names. `labels`: of each sample, before direction and reason."""

    def __init__(self, prefix: str, labels: Sequence[str] = ()) -> None:
        self._links = GaugeMetricFamily(prefix + "links", "Links that are up.", labels=labels)
        told = "Streams open on links, those that wait for a next request included."
        self._streams = GaugeMetricFamily(prefix + "link_streams", told, labels=labels)
        both = [*labels, "direction"]
        self._bytes = CounterMetricFamily(prefix + "link_bytes", "Bytes of links, by direction (in, out).", labels=both)
        self._frames = CounterMetricFamily(prefix + "link_frames", "Frames of links, by direction.", labels=both)
        self._opened = CounterMetricFamily(prefix + "link_streams_opened", "Streams opened.", labels=labels)
        told = "Streams that the shim gave up before it answered: too many, or it takes none any more."
        self._refused = CounterMetricFamily(prefix + "link_streams_refused", told, labels=labels)
        told = "Links that ended, by reason: lost, left, aborted, malformed, flood, unread, silent."
        self._ended = CounterMetricFamily(prefix + "links_ended", told, labels=[*labels, "reason"])

    def add(self, labels: Sequence[str], seen: Seen) -> None:
        """One set of samples."""
        carried = seen.carried
        self._links.add_metric(labels, seen.links)
        self._streams.add_metric(labels, seen.streams)
        self._opened.add_metric(labels, carried.opened)
        self._refused.add_metric(labels, carried.refused)
        for direction, size, frames in (
            ("in", carried.bytes_in, carried.frames_in),
            ("out", carried.bytes_out, carried.frames_out),
        ):
            self._bytes.add_metric([*labels, direction], size)
            self._frames.add_metric([*labels, direction], frames)
        for reason, links in seen.ended.items():
            self._ended.add_metric([*labels, reason], links)

    def __iter__(self) -> Iterator[Metric]:
        yield from (self._links, self._streams, self._bytes, self._frames, self._opened, self._refused, self._ended)
