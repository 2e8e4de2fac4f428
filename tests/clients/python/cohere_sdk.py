"""Cohere's SDK, whose rerankings are served."""

from __future__ import annotations

import cohere
from pooled import DOCUMENTS, KEY, QUERY, URL, check_ranking
from report import refused, works

client = cohere.ClientV2(api_key=KEY, base_url=URL)
first = cohere.Client(api_key=KEY, base_url=URL)

with works("documents ranked by relevance"):
    answer = client.rerank(model="rank", query=QUERY, documents=DOCUMENTS, top_n=2)
    check_ranking([each.index for each in answer.results], [each.relevance_score for each in answer.results])
    older = first.rerank(model="rank", query=QUERY, documents=DOCUMENTS, return_documents=True)
    check_ranking([each.index for each in older.results], [each.relevance_score for each in older.results])
    assert older.results[0].document.text == DOCUMENTS[older.results[0].index]
with refused("documents ranked by a model that embeds nothing of the name", cohere.NotFoundError, "nowhere"):
    client.rerank(model="nowhere", query=QUERY, documents=DOCUMENTS)
