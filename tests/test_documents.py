import gzip

import pytest

from hf_mot.data import iterate_documents, read_documents


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_separator_line_cuts_documents_and_empty_ones_are_dropped(tmp_path):
    path = write(
        tmp_path / "a.txt", "one\n\n two\n<|endoftext|>\n\n<|endoftext|>\nthree <|endoftext|>\n <|endoftext|>\n"
    )

    assert list(read_documents(path)) == ["one\n\n two", "three <|endoftext|>\n <|endoftext|>"]


def test_without_separator_a_file_is_one_document(tmp_path):
    paths = [write(tmp_path / "a.txt", "first\nline\n"), write(tmp_path / "b.txt", "café 😀")]

    assert list(read_documents(paths)) == ["first\nline", "café 😀"]
    assert list(read_documents(str(paths[1]))) == ["café 😀"]


def test_lines_makes_each_line_a_document(tmp_path):
    path = write(tmp_path / "a.txt", "first\n\n  second \n<|endoftext|>\nthird")

    assert list(read_documents([path], lines=True)) == ["first", "  second ", "third"]


def test_gzip_is_known_by_its_bytes_not_by_its_name(tmp_path):
    zipped = tmp_path / "zipped.txt"
    zipped.write_bytes(gzip.compress("naïve\n<|endoftext|>\nb".encode()))
    plain = write(tmp_path / "plain.gz", "plain")

    assert list(read_documents([zipped, plain])) == ["naïve", "b", "plain"]


def test_byte_order_mark_and_windows_newlines_are_no_text(tmp_path):
    path = write(tmp_path / "a.txt", "one\r\n<|endoftext|>\r\ntwo\r\n", encoding="utf-8-sig")

    assert list(read_documents(path)) == ["one", "two"]


def test_a_large_file_is_streamed(tmp_path):
    path = write(tmp_path / "a.txt", "good\n<|endoftext|>\n" * 100_000)
    with open(path, "ab") as file:
        file.write(b"\xff")
    documents = read_documents(path)

    assert next(documents) == "good"  # long before the bad byte is reached
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(byte 0xff.*iconv"):
        list(documents)


def test_missing_path_and_directory_are_named_at_the_call(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`paths` holds .*nowhere\.txt, which does not exist"):
        read_documents([tmp_path / "nowhere.txt"])
    with pytest.raises(ValueError, match="is a directory. Give the files in it"):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match="`paths` is empty"):
        read_documents([])


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:20] + b"\0" * 20 + data[40:]])
def test_damaged_gzip_is_named(tmp_path, damage):
    path = tmp_path / "a.gz"
    path.write_bytes(damage(gzip.compress(bytes(range(32, 127)) * 50)))

    with pytest.raises(ValueError, match=r"a\.gz is gzipped, but damaged"):
        list(read_documents(path))


def test_no_document_at_all_is_an_error(tmp_path):
    paths = [write(tmp_path / "a.txt", ""), write(tmp_path / "b.txt", " \n<|endoftext|>\n\n")]

    with pytest.raises(ValueError, match=r"`paths` holds no document: .*a\.txt, .*b\.txt"):
        list(read_documents(paths))


def test_strings_and_dataset_rows_become_documents():
    assert list(iterate_documents(text for text in ["a", "", "b"])) == ["a", "b"]
    assert list(iterate_documents([{"text": "a", "label": 1}, {"text": "b", "label": 2}])) == ["a", "b"]
    assert list(iterate_documents([{"body": "a"}], text_column="body")) == ["a"]


def test_datasets_are_taken_as_they_are():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"body": ["a", "b"], "id": [1, 2]})

    assert list(iterate_documents(dataset, text_column="body")) == ["a", "b"]
    assert list(iterate_documents(dataset.to_iterable_dataset(), text_column="body")) == ["a", "b"]
    assert list(iterate_documents(dataset["body"])) == ["a", "b"]
    with pytest.raises(ValueError, match="`text_column` is 'text', but the dataset has the columns body, id"):
        list(iterate_documents(dataset))
    with pytest.raises(TypeError, match=r"got a DatasetDict with the keys train.*documents\['train'\]"):
        iterate_documents(datasets.DatasetDict(train=dataset))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("one string", "got one string"),
        (7, "got int"),
        (["a", 3], "document 1 is of type int"),
        ([{"text": None}], "document 0 is of type NoneType"),
        ([b"bytes"], "document 0 is of type bytes"),
    ],
)
def test_what_is_no_text_is_refused_by_name(documents, message):
    with pytest.raises(TypeError, match=f"`documents` must .*{message}"):
        list(iterate_documents(documents))


def test_no_text_in_an_iterable_is_an_error():
    with pytest.raises(ValueError, match="`documents` holds no text"):
        list(iterate_documents(["", "  "]))
