"""Second stage: reads rows of numbers as JSON, one request a line, one row or a list of them; writes probabilities."""

import json
import sys

import torch

import fusepass

net = fusepass.load(sys.argv[1])
with torch.inference_mode():
    for line in sys.stdin:
        rows = torch.tensor(json.loads(line), dtype=torch.float32)
        print(json.dumps(net(torch.atleast_2d(rows)).tolist()), flush=True)
