"""Long and external texts: chunks, BM25 words, condensing, removal of control tokens."""
