"""What a rank prints: a pipe for each of its streams, emptied as it fills, shown when asked."""

import codecs
import os
import sys

# More than a pipe holds, so that one read empties it.
PIPE = 1 << 20


class Stream:
    """One stream of one rank: its pipe, and what came out of it so far."""

    def __init__(self, target):
        self.target = target
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.unshown = []
        self.tail = ""

    def drain(self) -> bool:
        """Take what is there now; False at the end of the stream."""
        try:
            data = os.read(self.reader, PIPE)
        except BlockingIOError:
            return True
        text = self.decode(data, final=not data)
        self.unshown.append(text)
        self.tail = (self.tail + text[-2000:])[-2000:]
        return bool(data)

    def show(self):
        text = "".join(self.unshown)
        self.unshown.clear()
        if text:
            print(text, end="", file=getattr(sys, self.target), flush=True)

    def close_writer(self):
        """Once the rank has it: so that the stream ends when the rank does."""
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None

    def close(self):
        self.close_writer()
        os.close(self.reader)
