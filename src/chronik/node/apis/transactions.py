"""Why produce requests with a transactional id are refused: all clients treat this error as fatal and do not retry."""

from chronik.wire.errors import ErrorCode

TRANSACTIONS_REFUSED = ErrorCode.transactional_id_authorization_failed
TRANSACTIONS_REFUSED_MESSAGE = "This broker does not support transactions: use a producer without a transactional id."
