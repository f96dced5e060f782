"""Writes the texts of Parquet files as JSON Lines, for build/tokenize --jsonl:

    python3 data/parquet.py train-*.parquet > train.jsonl          needs pyarrow (pip install pyarrow)
    python3 data/parquet.py --column content x.parquet > x.jsonl
"""
import argparse
import json

import pyarrow.parquet

parser = argparse.ArgumentParser()
parser.add_argument('--column', default='text')
parser.add_argument('files', nargs='+')
options = parser.parse_args()
for name in options.files:
    for batch in pyarrow.parquet.ParquetFile(name).iter_batches(columns=[options.column]):
        for text in batch.column(0).to_pylist():
            print(json.dumps({'text': text}))
