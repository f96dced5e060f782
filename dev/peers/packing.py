"""Writes the numbers of rows that TRL's packing gives, for build/test_sft: dev/test/fixtures/packing.txt.

    python3 dev/peers/packing.py [> dev/test/fixtures/packing.txt]

20 random sets of lengths of several shapes go through trl.pack_dataset(strategy="bfd"), with seq_length = --seq + 1: a row
has one token more than inputs. A line has seq_length, TRL's number of rows, and the lengths.
"""
import random
import sys

try:
    import trl
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset
except ImportError as missing:
    print(f"skipped: {missing}; pip install trl", file=sys.stderr)
    sys.exit(0)

disable_progress_bars()
random.seed(5)
print(f"# Written by dev/peers/packing.py with TRL {trl.__version__}: tokens of a row, rows of pack_dataset, lengths")
for number in range(20):
    room = random.choice([17, 65, 129, 257])
    most = [room, room // 2, room // 5, room][number % 4]
    lengths = [random.randint(2, most) for _ in range(random.randint(10, 110))]
    if number % 4 == 3:  # most of one length
        lengths = [room // 3 if random.random() < 0.7 else n for n in lengths]
    rows = pack_dataset(Dataset.from_dict({"input_ids": [[1] * n for n in lengths]}), room, strategy="bfd")
    assert sum(len(row) for row in rows["input_ids"]) == sum(lengths)
    print(room, len(rows), *lengths)
