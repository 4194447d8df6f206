"""Made the files in this folder with datasets 5.2 and pyarrow 26: `python tests/train/dataset/make.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [{"text": f"Line {number} of a play.", "number": number} for number in range(40)]

if __name__ == "__main__":
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(ROWS)
    DatasetDict(train=rows, test=rows.select(range(3))).save_to_disk(
        HERE / "saved", num_shards={"train": 2, "test": 1}
    )
    rows.to_parquet(HERE / "rows.parquet", batch_size=15)
    (HERE / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
