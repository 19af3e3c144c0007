"""Random damage: to bytes, to files of a folder, and to JSON by someone who can seal it again."""

import hashlib
import json
import os
import random
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

SEAL_BYTES = 20
DESCRIBED = re.compile(r"steps-\d+\.safetensors|run\.inspection|a\.contrast")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1 << 62, 10**80, 1.5, 1e300, "", "load", "x" * 5_000, "\x1b[2J", "../x",
    "float32", [], [[]], [1, 2], {}, {"$float": "nan"}, {"tensor": "0"}, {"dict": [[1, 2]]},
)  # fmt: skip


def damage(data: bytes, choose: random.Random) -> bytes:
    """The data with one to three random changes."""
    changed = bytearray(data)
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        at = choose.randrange(len(changed) + 1)
        kind = choose.randrange(9)
        if kind < 2 and at < len(changed):
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + choose.randrange(1, 30)]
        elif kind == 4:
            changed[at:at] = choose.randbytes(choose.randrange(1, 30))
        elif kind == 5:
            end = min(len(changed), at + choose.randrange(1, 30))
            changed[at:end] = bytes(end - at)
        elif kind == 6:
            changed[at:at] = changed[at : at + choose.randrange(1, 200)]
        elif kind == 7 and changed:
            changed[-1] = choose.randrange(256)
        else:
            digits = [index for index, each in enumerate(changed) if 48 <= each <= 57]
            if digits:
                changed[choose.choice(digits)] = choose.choice(b"0123456789-e.")
    return bytes(changed)


def damage_file(path: Path, secret: Path, choose: random.Random) -> str:
    """Change one file of a folder as an accident or an enemy without our code would; says how."""
    kind = choose.choice(["bytes"] * 12 + [
        "removed", "emptied", "cut at a line", "a folder", "a pipe", "a link outside",
        "a link to itself", "copied", "renamed", "sparse", "blank lines",
    ])  # fmt: skip
    data = path.read_bytes()
    if kind == "copied":
        another = path.name.replace("-000", "-007", 1)  # the name of another segment
        shutil.copy(path, path.with_name(another if another != path.name else f"{path.name}x"))
        return kind
    path.unlink()
    if kind == "bytes":
        path.write_bytes(damage(data, choose))
    elif kind == "emptied":
        path.touch()
    elif kind == "cut at a line":
        lines = data.splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: choose.randrange(len(lines))]) if lines else b"")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link outside":
        secret.write_bytes(data)
        path.symlink_to(secret)
    elif kind == "a link to itself":
        path.symlink_to(path)
    elif kind == "renamed":
        path.with_name(f"{path.name}x").write_bytes(data)
    elif kind == "sparse":
        path.write_bytes(data)
        os.truncate(path, 1 << choose.randrange(20, 41))
    elif kind == "blank lines":
        path.write_bytes(data + b"\n" * choose.choice([1, 1_000, 200_000]))
    return kind


def seal(body: bytes) -> bytes:
    """JSON of any kind with the right checksum, as our files end."""
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


def change_sealed(data: bytes, choose: random.Random) -> bytes:
    """Sealed JSON, changed and sealed again: one value of it, or its bytes."""
    body = data.rstrip(b"\n")[:-SEAL_BYTES]
    if choose.random() < 0.3:
        return seal(damage(body, choose))
    record = json.loads(body + b"}")
    change_value(record, choose)
    return seal(json.dumps(record).encode()[:-1])


def change_value(value: Any, choose: random.Random) -> None:
    """Put an odd value somewhere into a list or an object, or take something out."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = choose.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and choose.random() < 0.8:
            value = value[key]
            continue
        if choose.random() < 0.2:
            del value[key]
        else:
            value[key] = choose.choice(ODD)
        return


def change_tensor_file(data: bytes, choose: random.Random) -> bytes:
    """A safetensors file with another header, or other tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = data[8 : 8 + length], data[8 + length :]
    kind = choose.random()
    if kind < 0.4:
        record = json.loads(header)
        change_value(record, choose)
        header = json.dumps(record).encode()
    elif kind < 0.7:
        header = damage(header, choose)
    else:
        tensors = damage(tensors, choose)
    size = length if choose.random() < 0.1 else len(header)
    return struct.pack("<Q", size) + header + tensors


def change_described(path: Path, choose: random.Random) -> None:
    """Change a file of tensors that has its description in the header, and put its checksums right.

    Its checksums are `crc32` of the tensors, `layout` of what the header says of them, and the one
    that seals the description.
    """
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    said = header.pop("__metadata__")
    kind = choose.random()
    if kind < 0.6:
        key = choose.choice([each for each in said if each in ("torchfmri", "record")])
        said[key] = change_sealed(said[key].encode(), choose).decode(errors="replace")
    elif kind < 0.8:
        change_value(header, choose)
    else:
        tensors = damage(tensors, choose)
    layout = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    said |= {"crc32": f"{zlib.crc32(tensors):08x}", "layout": f"{zlib.crc32(layout):08x}"}
    text = json.dumps({"__metadata__": said, **header}, ensure_ascii=False).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)


def change_on_purpose(folder: Path, choose: random.Random) -> str:
    """Change a file and every checksum that guards it; says which file it was."""
    described = sorted(each for each in folder.rglob("*") if DESCRIBED.fullmatch(each.name))
    if described:
        path = choose.choice(described)
        change_described(path, choose)
        return path.name
    files = sorted(each for each in folder.rglob("*") if each.suffix in (".json", ".jsonl"))
    files = [each for each in files if b'"crc32":"' in each.read_bytes()[-30:]]
    if not files:  # version 0.1 had no checksums
        path = choose.choice(sorted(each for each in folder.rglob("*.json") if each.is_file()))
        record = json.loads(path.read_bytes())
        change_value(record, choose)
        path.write_text(json.dumps(record, indent=1))
        return path.name
    path = choose.choice(files)
    lines = path.read_bytes().splitlines(keepends=True) if path.suffix == ".jsonl" else []
    at = choose.randrange(len(lines)) if lines else 0
    data = lines[at] if lines else path.read_bytes()
    record = json.loads(data)
    named = record.get("segment") or path.with_suffix(".safetensors").name
    tensors = path.with_name(named)
    if choose.random() < 0.5 and tensors.exists():
        content = change_tensor_file(tensors.read_bytes(), choose)
        tensors.unlink()  # it may be mapped
        tensors.write_bytes(content)
        record |= {"bytes": len(content), "checksum": f"{zlib.crc32(content):08x}"}
        del record["crc32"]
        changed, named = seal(json.dumps(record).encode()[:-1]), tensors.name
    else:
        changed, named = change_sealed(data, choose), path.name
    if lines:
        lines[at] = changed + b"\n"
        changed = b"".join(lines)
    path.write_bytes(changed)
    relist(path)
    return named


def relist(path: Path) -> None:
    """Put the digests right that the `part.json` beside a file of an incident has."""
    part = path.with_name("part.json")
    if part == path or not part.exists():
        return
    record = json.loads(part.read_bytes())
    for name, entry in record["files"].items():
        data = path.with_name(name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del record["crc32"]
    part.write_bytes(seal(json.dumps(record).encode()[:-1]))
