"""Damaged tars: cut short, broken in the middle, or compressed; and the sample counts in the files beside them.
Python's tarfile silently takes a bad header for the end of the tar.

`walk` goes on after the damage, at the next header with a valid checksum. `Losses` counts and names the lost samples.
Bytes changed inside a member are not seen here; if its image then fails to decode, it counts as a bad sample.
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import re
import tarfile

CHUNK = 2**16  # bytes read at a time when looking for the next header
RECORD = 10240  # bytes; writers pad a tar with zeros to a multiple of this
MOST_ZEROS = 2**20  # bytes of zeros that may end a tar; more means a preallocated file whose download never finished
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}  # how they begin
USUAL = 0.05  # a set of extensions that at least this share of a tar's samples has counts as a complete sample


@dataclasses.dataclass
class Damage:
    """A byte range of a tar that cannot be read: first byte, length, reason, and the truncated member ('' = none)."""
    at: int
    size: int
    why: str
    cut: str = ""


class Loss(ValueError):
    """Why a sample is lost to damage, or why a member is skipped."""


class Front:
    """A file that is read from front to back, with push-back (give_back). `last`: the bytes of the last read.

    seeks: skip by seeking instead of reading (for a file on a disk)."""

    def __init__(self, file, seeks=False):
        self.file, self.at, self.kept, self.last, self.end = file, 0, b"", b"", None
        if seeks:
            self.end = file.seek(0, os.SEEK_END)
            file.seek(0)

    def tell(self):
        return self.at

    def read(self, n):
        """The next n bytes, fewer at the end.   Raises: tarfile.ReadError on a number below zero."""
        if n < 0:
            raise tarfile.ReadError("a size below zero")
        data, self.kept = self.kept[:n], self.kept[n:]
        while len(data) < n and (more := self.file.read(n - len(data))):
            data += more
        self.at, self.last = self.at + len(data), data
        return data

    def give_back(self, data):
        self.at, self.kept = self.at - len(data), data + self.kept

    def skip(self, n):
        """Moves on by n bytes; False if the file ends before that."""
        if self.end is None:
            while n and (got := len(self.read(min(n, CHUNK)))):
                n -= got
            return not n
        if n:
            self.at, self.kept = self.at + n, b""
            self.file.seek(self.at)
        return self.at <= self.end


def refuse_compressed(head):
    """Raises: tarfile.ReadError if these first six bytes are those of a compressed file."""
    for start, word in COMPRESSED.items():
        if head.startswith(start):
            raise tarfile.ReadError(f"compressed with {word}: unpack it, plain tars are needed")


def walk(file, wanted):
    """Yields (TarInfo, its bytes if wanted(name) else None, its size in bytes with headers) for each member of a
    Front, and (Damage, None, 0) for each damaged range.

    Raises: tarfile.ReadError if no header at all is found, or the file is compressed.
    """
    head = file.read(6)
    file.give_back(head)
    refuse_compressed(head)
    tar, found = tarfile.TarFile(fileobj=io.BytesIO(bytes(1024))), False  # an open TarFile that has read nothing yet
    tar.fileobj = file
    while True:
        at = file.tell()
        try:
            member = tarfile.TarInfo.fromtarfile(tar)
            if member.size < 0 or tar.offset < file.tell():
                raise tarfile.ReadError("a size below zero")
        except (tarfile.TarError, ValueError, OverflowError):
            more, zeros = _resume(file, at)
            size = file.tell() - at
            if more and found and zeros and 1024 <= size < 1024 + RECORD and file.tell() % RECORD == 0:
                continue  # the end of a tar to which another was appended
            if not (more or found) and (size == 0 or not zeros):
                raise tarfile.ReadError("an empty file" if file.tell() == 0 else "no header of a tar in it") from None
            if more or not (zeros and 0 < size <= MOST_ZEROS):
                yield Damage(at, size, _what(at, size, more, zeros)), None, 0
            if not more:
                return
            continue
        found, left = True, tar.offset - file.tell()  # bytes, with the padding of the last block
        size = min(member.size, left)  # a link announces a size but has no bytes
        data = file.read(size) if member.isreg() and wanted(member.name) else None
        if len(data) < size if data is not None else not file.skip(size):
            end = file.tell() if file.end is None else file.end
            yield Damage(at, 0, f"the file ends at byte {end:,}, inside {member.name}", member.name), None, 0
            return
        yield member, data, tar.offset - at
        file.skip(left - size)


def _what(at, size, more, zeros):
    if not size:
        return f"the file ends at byte {at:,} without an end-of-tar mark"
    kind = "zeros" if zeros else "no header of a tar"
    return f"{kind} from byte {at:,} to {'byte ' + format(at + size, ',') if more else 'its end'}"


def _resume(file, at):
    """Moves on from a bad header to the next valid one. Returns (whether there is one, whether all bytes before it are
    zeros). It looks at every byte, not at every 512: where bytes are missing, all that follows is shifted."""
    window, first = file.last, 1
    zeros = file.tell() - len(window) == at
    while True:
        hit = window.find(b"ustar", first + 257)
        while hit >= 0:
            start = hit - 257
            if _is_header(window[start:start + tarfile.BLOCKSIZE]):
                file.give_back(window[start:])
                return True, zeros and not window[:start].strip(b"\0")
            hit = window.find(b"ustar", hit + 1)
        zeros = zeros and not window.strip(b"\0")
        more = file.read(CHUNK)
        if not more:
            return False, zeros
        window, first = window[1 - tarfile.BLOCKSIZE:] + more, 0


def _is_header(block):
    with contextlib.suppress(tarfile.TarError, ValueError):
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size >= 0
    return False


def split_name(member):
    """Name of a file in a tar -> (key, extension): 'a/01.seg.png' -> ('a/01', 'seg.png')."""
    folder, _, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}/{stem}".lstrip("/"), extension.lower()


def not_followed(member):
    """Why a member is skipped, '' if it is read. Skipped are links, devices, sparse files, and names that are not
    UTF-8 or lead out of the tar."""
    if member.issym() or member.islnk():
        return f"{member.name} is a link"
    if member.isdev() or member.issparse():
        return f"{member.name} is no plain file"
    if re.search("[\ud800-\udfff]", member.name):
        return f"{ascii(member.name)}: a name that is no UTF-8"
    return f"{member.name}: a name that leads out of the tar" if ".." in member.name.split("/") else ""


class Losses:
    """What one tar has lost: `files` walks it, and `lost` gives the result at the end.

    A sample next to damage is a suspect. It is lost if it lacks parts that the other samples have. The number of
    samples inside the damage is estimated from its bytes and from the numbered keys on both sides."""

    def __init__(self):
        self.key, self.parts, self.suspected, self.cut = None, set(), False, None
        self.usual, self.suspects, self.gaps = collections.Counter(), {}, []  # gaps: [Damage, key before, key after]
        self.samples = self.bytes = 0

    def files(self, file, wanted):
        """Yields (key, extension, TarInfo, its bytes if wanted(extension) else None) for each file in a Front."""
        for member, data, span in walk(file, lambda name: wanted(split_name(name)[1])):
            if isinstance(member, Damage):
                self.gap(member, split_name(member.cut)[0] if member.cut else None)
            elif not member.isdir():
                key, extension = split_name(member.name)
                self.add(key, extension, span)
                yield key, extension, member, data

    def add(self, key, extension, span):
        """Counts an intact member of `span` bytes."""
        if key != self.key:
            self.close()
            self.key, self.parts, self.suspected = key, set(), False
        if self.gaps and self.gaps[-1][2] is None:
            self.gaps[-1][2], self.suspected = key, True
        self.parts.add(extension)
        self.bytes += span

    def gap(self, damage, key=None):
        """Notes a damaged range. key: that of the sample whose member is truncated."""
        if key is not None:
            self.add(key, "", 0)
            self.cut = key
        if key is None and self.gaps and self.gaps[-1][2] is None:  # nothing lies between this one and the last
            self.gaps[-1][0] = dataclasses.replace(self.gaps[-1][0], size=self.gaps[-1][0].size + damage.size)
        else:
            self.gaps.append([damage, self.key, None])
        self.suspected = True

    def close(self):
        """Ends the current sample."""
        if self.key is None:
            return
        self.samples += 1
        if self.suspected:
            self.suspects.setdefault(self.key, set()).update(self.parts)
        else:
            self.usual[frozenset(self.parts)] += 1
        self.key = None

    def lost(self):
        """([(keys, n, why)], partial keys): n samples are lost for the reason `why`, with their keys if they are known.
        Partial keys: the set of the lost samples of which some parts are left."""
        self.close()
        usual = [shape for shape, n in self.usual.items() if n >= USUAL * self.usual.total()]
        partial = {key for key, parts in self.suspects.items()
                   if key == self.cut or usual and not any(shape <= parts for shape in usual)}
        mean = self.bytes / max(1, self.samples)  # bytes per sample
        out, told = [], set()
        for damage, before, behind in self.gaps:
            keys = sorted({before, behind} & partial - told)
            told.update(keys)
            where = (f"between {before} and {behind}" if before and behind
                     else f"after {before}" if before else f"before {behind}")
            why = damage.why if damage.cut else f"{damage.why}, {where}"
            out += [([key], 1, why) for key in keys]
            number = max(0 if keys else 1, round(damage.size / mean) - len(keys)) if mean else 1  # one at least
            inside = _between(before, behind)
            if inside is not None:
                number = min(number, len(inside))
            if number or not keys:
                out.append((list(inside) if inside and number == len(inside) else [], number, why))
        return out, partial

    def each(self, expected=None):
        """([(key, why)] with one entry per lost sample, the partial keys as in `lost`).

        expected: (samples the tar should hold, the file that says so) if known; it then decides how many are lost."""
        lost, partial = self.lost()
        entries = [(key, why) for keys, n, why in lost for key in (keys or _numbered(n, why))]
        if expected:
            number, file = expected
            missing = max(0, number - (self.samples - len(partial)))
            why = f"{number - missing:,} of the {number:,} samples that {file} names"
            entries = entries[:missing] + [(key, why) for key in _numbered(missing - len(entries), why)]
        return entries, partial


def _numbered(n, why):
    return [f"lost {k + 1} of {n} ({why})" for k in range(n)]


def _between(before, behind):
    """The keys between two numbered keys; () if both are the same key, None if they cannot be known."""
    if before is None or behind is None:
        return None
    if before == behind:
        return ()
    (head, low), (tail, high) = (re.fullmatch(r"(.*?)(\d*)", key, re.DOTALL).groups() for key in (before, behind))
    if head != tail or len(low) != len(high) or not low or len(low) > 15 or not 0 < int(high) - int(low) < 10**6:
        return None
    return [f"{head}{k:0{len(low)}}" for k in range(int(low) + 1, int(high))]


# ---- what lies beside the tars ----
def expected(paths):
    """{path: (samples, name of the file that says so)}, where a file beside a tar or one folder above tells.

    Such files are <tar>_stats.json (img2dataset), sizes.json (webdataset), _info.json or info.json (timm, pixparse),
    and the indices of wids. Those that cannot be read are ignored."""
    out, paths = {}, dict.fromkeys(map(os.path.abspath, paths))
    folders = dict.fromkeys(folder for path in paths for folder in
                            (os.path.dirname(path), os.path.dirname(os.path.dirname(path))))
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            file = path.removesuffix(".tar") + "_stats.json"
            out[path] = int(_read(file)["successes"]), os.path.basename(file)
    for folder in folders:
        for name in ("sizes.json", "_info.json", "info.json", "dataset.json", "shardindex.json", "index.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                for tar, n in _counts(name, _read(os.path.join(folder, name))):
                    inside = os.path.basename(tar) if "://" in tar or os.path.isabs(tar) else tar
                    path = os.path.normpath(os.path.join(folder, inside))
                    if path in paths:
                        out.setdefault(path, (int(n), name))
    return out


def _read(file):
    if os.path.getsize(file) > 2**26:  # bytes; no such file is that large
        raise ValueError("too large")
    with open(file, encoding="utf8") as f:
        return json.load(f)


def _counts(name, content):
    """(tar, samples) pairs of one of these files."""
    if name == "sizes.json":
        return content.items()
    if name in ("_info.json", "info.json"):
        splits = content["splits"].values()
        return [pair for split in splits for pair in zip(split["filenames"], split["shard_lengths"])]
    return [(shard["url"], shard["nsamples"]) for shard in content["shardlist"]]
