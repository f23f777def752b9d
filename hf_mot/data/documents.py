"""Documents, one string each: from text files, a `datasets` dataset or any iterable of strings."""

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SEPARATOR = "<|endoftext|>"
_GZIP_MAGIC = b"\x1f\x8b"


def read_documents(paths: str | os.PathLike | Iterable[str | os.PathLike], lines: bool = False) -> Iterator[str]:
    """
    Reads the documents of UTF-8 text files, one after the other; a file is never in memory as a whole unless it is one
    document. Gzipped files are known by their first bytes, whatever their name.

    Args:
        paths (`str`, `os.PathLike` or an iterable of them): The files. Within one, documents are separated by a line
            that is exactly `<|endoftext|>`; without such a line the file is one document.
        lines (`bool`, *optional*, defaults to `False`): One document a line.

    Returns:
        `Iterator[str]`: The documents that are not empty, without the newlines around them.

    Raises:
        FileNotFoundError: If a file does not exist; at the call.
        ValueError: If `paths` is empty or holds a directory, at the call; while iterating, if a file is not UTF-8 or
            its gzip data is damaged, or if there was no document at all.
    """
    paths = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not paths:
        raise ValueError("`paths` is empty. Give at least one text file.")
    for path in paths:
        if path.is_dir():
            raise ValueError(f"`paths` must hold files, but {path} is a directory. Give the files in it, {path}/*.")
        if not path.exists():
            raise FileNotFoundError(f"`paths` holds {path}, which does not exist. Check the path.")
    return _checked(_read_all(paths, lines), f"`paths` holds no document: {', '.join(map(str, paths))} hold no text")


def iterate_documents(documents: Iterable[str | Mapping[str, str]], text_column: str = "text") -> Iterator[str]:
    """
    Turns a `datasets` dataset (streamed or not) or an iterable of strings into an iterator of documents.

    Args:
        documents (`Iterable[str]` or a dataset): Strings, or rows with a column of strings.
        text_column (`str`, *optional*, defaults to `"text"`): The column that holds the text of a row.

    Returns:
        `Iterator[str]`: The documents that are not empty.

    Raises:
        TypeError: If `documents` is one string, a dict of splits or no iterable, at the call; while iterating, if a
            document is not a string.
        ValueError: While iterating, if a row lacks the column, or if there was no document at all.
    """
    if isinstance(documents, str | bytes):
        raise TypeError("`documents` must be an iterable of strings, got one string. Pass [text].")
    if isinstance(documents, Mapping):
        raise TypeError(
            f"`documents` must be an iterable of strings or a dataset, got a {type(documents).__name__} with the keys "
            f"{', '.join(map(str, documents))}. Pick one, e.g. documents[{next(iter(documents), 'train')!r}]."
        )
    if not isinstance(documents, Iterable):
        raise TypeError(
            f"`documents` must be an iterable of strings or a dataset, got {type(documents).__name__}. "
            "Read text files with hf_mot.data.read_documents."
        )
    return _checked(_texts(documents, text_column), "`documents` holds no text")


def _checked(documents: Iterator[str], nothing: str) -> Iterator[str]:
    """Drops empty documents; that there is no other is an error."""
    empty = True
    for document in documents:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise ValueError(f"{nothing}. Give text with at least one document.")


def _texts(rows: Iterable[str | Mapping[str, str]], text_column: str) -> Iterator[str]:
    for index, row in enumerate(rows):
        text = row
        if isinstance(row, Mapping):
            if text_column not in row:
                raise ValueError(
                    f"`text_column` is {text_column!r}, but the dataset has the columns {', '.join(map(str, row))}. "
                    "Name the one that holds the text."
                )
            text = row[text_column]
        if not isinstance(text, str):
            raise TypeError(
                f"`documents` must hold strings, but document {index} is of type {type(text).__name__}. "
                "Convert it, or leave it out."
            )
        yield text


def _read_all(paths: list[Path], lines: bool) -> Iterator[str]:
    for path in paths:
        try:
            yield from _read(path, lines)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path} is not UTF-8 text (byte 0x{byte:02x}: {error.reason}). "
                f"Convert it, e.g. `iconv -f latin1 -t utf-8 {path}`."
            ) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is gzipped, but damaged ({error}). Copy or download it again.") from error


def _read(path: Path, lines: bool) -> Iterator[str]:
    with open(path, "rb") as file:
        gzipped = file.peek(2)[:2] == _GZIP_MAGIC
        # utf-8-sig: a byte order mark at the start of a file is not text.
        with io.TextIOWrapper(gzip.open(file) if gzipped else file, encoding="utf-8-sig") as text:
            document: list[str] = []
            for line in text:
                end = line.rstrip("\n") == SEPARATOR
                if not end:
                    document.append(line)
                if end or lines:
                    yield "".join(document).strip("\n")
                    document.clear()
            yield "".join(document).strip("\n")
