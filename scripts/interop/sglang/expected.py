"""expected.py STATE: what the ranks of a run of engine.py held, one line for each tensor, for tests/fixtures/sglang.

Rank, name, dtype, shape and the first half of the BLAKE3 of its bytes.
"""

import pathlib
import sys

from blake3 import blake3

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from compare import tensors

for file in sorted(pathlib.Path(sys.argv[1]).glob("model-rank-*.safetensors")):
    rank = file.name.split("-")[2]
    for name, (dtype, shape, data) in sorted(tensors(file).items()):
        print(rank, name, dtype, str(shape).replace(" ", ""), blake3(data).hexdigest()[:32])
