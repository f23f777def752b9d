"""Text for fitting and measuring translators."""

from hf_mot.data.documents import iterate_documents, read_documents

__all__ = ["iterate_documents", "read_documents"]
