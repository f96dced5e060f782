"""Writes the texts of Parquet files as JSON Lines, for build/tokenize --jsonl:

    python3 data/parquet.py train-*.parquet > train.jsonl          needs pyarrow (pip install pyarrow)
    python3 data/parquet.py --column content x.parquet > x.jsonl
"""
import argparse
import json
import sys

import pyarrow.parquet

parser = argparse.ArgumentParser()
parser.add_argument('--column', default='text')
parser.add_argument('files', nargs='+')
options = parser.parse_args()
for name in options.files:
    file = pyarrow.parquet.ParquetFile(name)
    if options.column not in file.schema_arrow.names:
        sys.exit(f'{name} has no column {options.column}; give --column, one of {", ".join(file.schema_arrow.names)}')
    for batch in file.iter_batches(batch_size=256, columns=[options.column]):
        for text in batch.column(0).to_pylist():
            print(json.dumps({'text': text}))
