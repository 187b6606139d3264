"""DrawnTokens: what a step drew, still on the device, where the next step can read what the host does not know yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from noria.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """token_ids: [R] int64 on the device, -1 where nothing could be drawn. rows: request id to index in it."""

    token_ids: Tensor | None = None
    rows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, token_ids: Tensor, request_ids: Sequence[int]) -> DrawnTokens:
        return cls(token_ids, {request_id: row for row, request_id in enumerate(request_ids)})

    def fill_in(self, token_ids: Tensor, places: Mapping[int, int]) -> None:
        """Writes into token_ids [T] int64, on the same device and stream, what was drawn for each request.

        places: request id to index in token_ids. A row that failed gets token 0: it ends as soon as that is known, so
        that only the index must be good. Raises ValueError for a request that nothing was drawn for.
        """
        if not places:
            return
        missing = places.keys() - self.rows.keys()
        if missing or self.token_ids is None:
            raise ValueError(f"the step before drew no token for the requests {sorted(missing)}")
        rows = np.array([self.rows[request_id] for request_id in places], dtype=np.int64)
        targets = np.array(list(places.values()), dtype=np.int64)
        sources, targets_there = upload((rows, targets), token_ids.device)
        token_ids.index_copy_(0, targets_there, self.token_ids.index_select(0, sources).clamp_(min=0))
