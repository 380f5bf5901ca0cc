"""Streams whose order does not depend on the number of processes and loader workers, also for other projects."""

from ..base.faults import BadSample
from .loading import StreamedPair, StreamLoader, stream_loader

__all__ = ["BadSample", "StreamLoader", "StreamedPair", "stream_loader"]
