"""Token sequences and the hashes that name their prefixes."""

from core.text.block_hash import BlockHash, block_hashes, hash_of
from core.text.token_log import TokenLog, extended
