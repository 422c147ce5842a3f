# SPDX-License-Identifier: Apache-2.0
"""Files that are never torn, whether the process is killed or the disk is full; event files."""

import contextlib
import csv
import errno
import io
import itertools
import logging
import math
import os
import time

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # tensorboard is not installed
    SummaryWriter = None

# Seconds from one attempt to write events to the next, doubled each time: each leaves a file.
FIRST_PAUSE, LONGEST_PAUSE = 60, 3600


def replace_file(path, content):
    """Replace a file's content atomically; if that raises OSError, the file is unchanged."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            _write_all(file, content)
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # That it has a new name now is to survive a crash, too. Some file systems cannot do that.
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(folder)
    os.close(folder)


def set_aside(path, reason):
    """Rename a file that cannot be used to NAME.1 (or .2, ...), so that nothing is lost."""
    new = next(
        p for i in itertools.count(1) if not (p := path.with_name(f"{path.name}.{i}")).exists()
    )
    path.rename(new)
    logging.warning("%s is now %s: %s", path, new.name, reason)


def _write_all(file, content):
    content = memoryview(content)
    while content:
        content = content[file.write(content) :]  # a disk that becomes full takes a part at first


class GrowingFile:
    """A file to which pieces are appended atomically.

    If a piece cannot be written, the file is unchanged, this is logged, and the run goes on.
    """

    def __init__(self, path):
        self._path = path
        self._file = open(path, "ab", buffering=0)  # kept open for appending
        self._num_missing = 0

    def append(self, piece):
        """Add bytes; return whether they are in the file."""
        try:
            size = os.fstat(self._file.fileno()).st_size
            try:
                _write_all(self._file, piece)
            except OSError:
                self._file.truncate(size)
                raise
        except OSError as error:
            return self._report(error)
        return self._report(None)

    def replace(self, make_content):
        """Replace the content by function(content); return whether that was written."""
        try:
            replace_file(self._path, make_content(self._path.read_bytes()))
            file = open(self._path, "ab", buffering=0)
            self._file.close()
            self._file = file
        except OSError as error:
            return self._report(error)
        return True

    def is_current(self):
        """Return whether the path is still this file, and not another one, or none."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return False

    def close(self):
        if self._num_missing:
            logging.error("At the end of %s %d entries are missing", self._path, self._num_missing)
        try:
            self._file.close()
        except OSError as error:  # some file systems say here that writing failed
            logging.error("Cannot write %s: %s", self._path, error)

    def _report(self, error):
        # Counted first, as this file may be the very log that is written to.
        if error is not None:
            self._num_missing += 1
            if self._num_missing == 1:
                message = "Cannot write %s (%s): until that is over, entries are missing there"
                logging.error(message, self._path, error.strerror)
        elif self._num_missing:
            count, self._num_missing = self._num_missing, 0
            logging.warning("Can write %s again: %d entries are missing there", self._path, count)
        return error is None


class LogHandler(logging.Handler):
    """Writes log messages into a GrowingFile."""

    def __init__(self, path, log_format):
        super().__init__()
        self.setFormatter(logging.Formatter(log_format))
        self._path, self._file = path, GrowingFile(path)

    def emit(self, record):
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._file.append(f"{line}\n".encode(errors="backslashreplace"))

    def follow(self):
        """Go on in the file that has the path now, or in a new one: logs are rotated, say."""
        with self.lock:
            if not self._file.is_current():
                before, self._file = self._file, GrowingFile(self._path)
                before.close()

    def close(self):
        self._file.close()
        super().close()


class CSVFile:
    """A CSV file that grows by rows and, when a new metric turns up, by columns.

    Rows that were there before and go beyond `step` are dropped.
    """

    def __init__(self, path, step):
        self._path = path
        self._fields = ["_tick", "_time", "step"]
        self._open(step)

    def _open(self, step):
        lines = []
        try:
            if self._path.exists():
                lines = self._read(step)
        except (ValueError, csv.Error) as error:
            set_aside(self._path, f"it is damaged ({type(error).__name__}: {error})")
        header = self._encode(self._fields, [], header=True)
        replace_file(self._path, header + "".join(lines).encode())
        self._file, self._tick = GrowingFile(self._path), len(lines)

    def _read(self, step):
        """Return the lines of rows up to `step`, and take over the names of the columns."""
        # Rows stay text: after weeks there are hundreds of MB, as dicts ten times as much.
        lines = self._path.read_bytes().decode().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            del lines[-1]  # torn by a crash of the machine
        fields = next(csv.reader(lines[:1]), self._fields)
        if "step" not in fields:
            raise ValueError("it has no column step")
        place, steps = fields.index("step"), []
        for line in lines[1:]:
            row = next(csv.reader([line]), [])
            steps.append(int(row[place]) if len(row) > place and row[place].isdigit() else None)
        if step == 0 and any(s is not None for s in steps):
            set_aside(self._path, "the run begins anew, at step 0")
            return []
        self._fields = fields
        pairs = zip(lines[1:], steps, strict=True)
        return [line for line, s in pairs if s is not None and s <= step]

    def is_current(self):
        return self._file.is_current()

    def reopen(self):
        """Go on in the file that has the path now, or in a new one where this was renamed."""
        before = self._file
        self._open(math.inf)
        before.close()
        logging.warning("%s was renamed or replaced: rows go on under this name", self._path)

    def last_value(self, name):
        """Return the last value of a column as a float; None if there is none."""
        with open(self._path, newline="") as file:
            values = [row[name] for row in csv.DictReader(file) if row.get(name)]
        return float(values[-1]) if values else None

    def write(self, row):
        new = [key for key in row if key not in self._fields]
        if new:
            fields = self._fields + new

            def with_fields(content):
                rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
                return self._encode(fields, rows, header=True)

            if not self._file.replace(with_fields):
                return
            self._fields = fields
        row = {"_tick": self._tick, "_time": time.time(), **row}
        self._tick += self._file.append(self._encode(self._fields, [row]))

    def close(self):
        self._file.close()

    @staticmethod
    def _encode(fields, rows, header=False):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fields, extrasaction="ignore")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


class EventFile:
    """Metrics for TensorBoard, which drops what earlier files hold from `step` on.

    If they cannot be written, or tensorboard is missing, this is logged and the run goes on.
    """

    def __init__(self, folder, step):
        self._folder, self._writer = folder, None
        self._retry_time = -math.inf  # once they could not be written
        self._pause = FIRST_PAUSE
        if SummaryWriter is None:
            self._retry_time = math.inf
            logging.warning("Without the package tensorboard there is no event file: see logs.csv")
        else:
            self._writer = SummaryWriter(folder, purge_step=step)

    def write(self, step, metrics):
        if time.monotonic() < self._retry_time:
            return
        try:
            if self._writer is None:
                self._writer = SummaryWriter(self._folder, purge_step=step)
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            logging.error(
                "Cannot write TensorBoard's events (%s): trying again in %d s",
                error,
                self._pause,
            )
            self.close()
            self._retry_time = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._pause = FIRST_PAUSE

    def close(self):
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
