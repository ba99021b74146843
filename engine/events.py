"""Writes the events of a run for TensorBoard: figures, texts, and the flags.

events = Events(Path("out/x"), step=0)
events.hparams({"n_layer": 4})
events.scalars(10, {"train/loss": 2.5})
events.text(10, "eval/sample", "def main():")
"""

import os
import socket
import textwrap
import time
from pathlib import Path


class Events:
    """Writes TensorBoard events. These imports take 0.2 s; torch.utils.tensorboard would take 3 s."""

    def __init__(self, folder: Path, step: int):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ValueError(f"{error.name} is not installed; pip install tensorboard") from error
        self.Event, self.Summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter(open(folder / name, "wb"))
        self.write(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # readers then drop older events from `step` on
        self.write(step=step, session_log=start)

    def scalars(self, step: int, figures: dict):
        numbers = {tag: x for tag, x in figures.items() if isinstance(x, (int, float))}
        values = [self.Summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        self.write(step=step, summary=self.Summary(value=values))

    def text(self, step: int, tag: str, text: str):
        """Writes a text for the page TEXT, indented because this page reads Markdown."""
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        tensor = make_tensor_proto(textwrap.indent(text, "    ", lambda line: True))
        value = self.Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)
        self.write(step=step, summary=self.Summary(value=[value]))

    def hparams(self, flags: dict):
        """Writes the flags for the page HPARAMS, which shows them with the last value of each scalar."""
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        start = SessionStartInfo(start_time_secs=time.time())
        for name, value in flags.items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            setattr(start.hparams[name], f"{kind}_value", value)
        content = metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
        tag, nothing = metadata.SESSION_START_INFO_TAG, metadata.NULL_TENSOR
        self.write(summary=self.Summary(value=[self.Summary.Value(tag=tag, metadata=content, tensor=nothing)]))

    def write(self, **event):
        self.records.write(self.Event(wall_time=time.time(), **event).SerializeToString())
        self.records.flush()
