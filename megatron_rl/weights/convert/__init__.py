"""Conversions of checkpoint files: Hugging Face directories and Megatron's `torch_dist`; no model is built.

    source        a directory, opened by its metadata: names, shapes, dtypes, and rows on demand
    views         the same tensors under the other format's names: lists of pieces of rows, nothing copied
    job           writes a target from views, file by file in bounded memory; resumable, atomic

Which tensors make which is said by the families' tables alone, as in loading and export.
"""
