"""Wire protocol and TCP links: moves numbered byte ranges between agents. Knows nothing of KV."""
